"""Short names for what unit tests call on a batch all the time."""

from collections.abc import Sequence

from batch_model import BatchFactory, BatchShape
from triptych.engine_core.batch import Batch, Outcome, SequenceRules
from triptych.engine_core.ids import SequenceId

SHAPE = BatchShape(num_blocks=8, block_size=4, max_len=40)


def build(factory: BatchFactory, shape: BatchShape = SHAPE) -> Batch:
    """A batch of that shape."""
    caching, host_blocks = shape.prefix_caching, shape.num_host_blocks
    return factory(shape.num_blocks, shape.block_size, shape.layout, caching, host_blocks)


def rules(num_tokens: int, request_id: int = 0, /, **changes: object) -> SequenceRules:
    """Of a prompt of so many tokens, that end nothing soon."""
    start = SequenceRules(request_id, num_tokens, max_tokens=1000, max_len=1000)
    return start._replace(**changes)  # type: ignore[arg-type]  # the caller names fields


def open_text(
    batch: Batch,
    number: int,
    tokens: Sequence[int],
    salt: bytes = b"",
    spare: int = 0,
    **changes: object,
) -> int:
    """Open as the last one in order."""
    digests = batch.prefix_digests(tokens, salt)
    sequence_rules = rules(len(tokens), number, **changes)
    place = len(batch.sequence_ids())
    return batch.open(SequenceId(number), tokens, digests, sequence_rules, place, spare)


def fork(batch: Batch, number: int, new: int, **changes: object) -> None:
    """Fork as the last one in order."""
    num_prompt = len(batch.token_ids(SequenceId(number)))
    sequence_rules = rules(num_prompt, new, **changes)
    batch.fork(SequenceId(number), SequenceId(new), sequence_rules, len(batch.sequence_ids()))


def plan_all(batch: Batch) -> None:
    """A plan in which everybody gets everything."""
    assert batch.plan(1000, 1000, 1000)


def write(batch: Batch, shape: BatchShape = SHAPE) -> memoryview:
    """The planned step's slot."""
    slot = memoryview(bytearray(shape.layout.slot_bytes))
    batch.write(slot, 1)
    return slot


def step(batch: Batch, *drawn: int, shape: BatchShape = SHAPE) -> Outcome:
    """Plan everything, write, apply; token 9 for every sample without one in `drawn`."""
    plan_all(batch)
    write(batch, shape)
    count = len(batch.samples()[0])
    outcome = batch.apply([*drawn, *[9] * (count - len(drawn))])
    batch.check()
    return outcome


def close(batch: Batch, *numbers: int) -> None:
    """Close sequences, and check."""
    for number in numbers:
        batch.close(SequenceId(number))
    batch.check()


def compute_and_close(batch: Batch, number: int, tokens: Sequence[int], salt: bytes = b"") -> None:
    """Leave a text in the cache: all its tokens computed."""
    open_text(batch, number, tokens, salt)
    step(batch)
    close(batch, number)


def match(batch: Batch, tokens: Sequence[int], salt: bytes = b"") -> tuple[int, int]:
    """(computed, pending) of a text."""
    return batch.match(tokens, batch.prefix_digests(tokens, salt))


def text(num_tokens: int, first: int = 0) -> list[int]:
    """Tokens first, first + 1, ..."""
    return list(range(first, first + num_tokens))
