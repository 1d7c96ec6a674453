"""The twins walk in lockstep; what they must do is checked after every call."""

from collections.abc import Sequence

import pytest

from batch_model import BatchFactory
from batch_twins import TWINS
from batch_walk import BatchWalk
from triptych.engine_core import python_batch
from triptych.engine_core.batch import Outcome
from triptych.engine_core.block_tables import BlockTables
from triptych.engine_core.prefix_cache import PrefixCache
from triptych.engine_core.python_batch import PythonBatch
from triptych.engine_core.taken_tokens import TakenTokens, taken_tokens


def _walk(seeds: range, factories: Sequence[BatchFactory]) -> None:
    for seed in seeds:
        BatchWalk(seed, factories).run(num_rounds=15)


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_random_walks(first: int) -> None:
    _walk(range(first, first + 100), TWINS)


_APPLY = PythonBatch.apply


def _apply_and_keep_guesses(
    batch: PythonBatch, token_ids: Sequence[int], complete: Sequence[int] = ()
) -> Outcome:
    guesses = dict(batch._guesses)
    outcome = _APPLY(batch, token_ids, complete)
    batch._guesses.update({n: g for n, g in guesses.items() if n in batch.sequence_ids()})
    return outcome


FAULTS: dict[str, tuple[object, str, object]] = {
    "a shared block is written": (BlockTables, "_holders", lambda tables, block: 1),
    "no copy is made": (BlockTables, "copies", lambda tables: []),
    "copies are made backwards": (
        BlockTables,
        "copies",
        lambda tables: [(s, t) for t, s in reversed(tables._copies.items())],
    ),
    "a block that was taken is still found": (PrefixCache, "forget", lambda cache, block: None),
    "a closed sequence in flight gives its blocks back": (
        PythonBatch,
        "close",
        lambda batch, sequence_id: batch._release(batch._open.leave(sequence_id)),
    ),
    "blocks of drafts are kept": (BlockTables, "cut", lambda tables, table, num_tokens: None),
    "drafts are taken whatever is drawn": (
        TakenTokens,
        "num_drafted",
        property(lambda taken: len(taken[3])),
    ),
    "a draft that is taken is not computed": (TakenTokens, "num_drafted", 0),
    "logits that do not count are not finite": (
        python_batch,
        "taken_tokens",
        lambda step, drawn, complete: [
            each._replace(token_ids=[*each.token_ids[:-1], -1]) if -1 in drawn else each
            for each in taken_tokens(step, drawn, complete)
        ],
    ),
    "guesses outlive their step": (PythonBatch, "apply", _apply_and_keep_guesses),
    "a token more is taken for computed": (
        PythonBatch,
        "_progress",
        lambda batch, sequence, num_tokens: batch._open.progress(sequence, num_tokens + 1),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_walks_notice_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        _walk(range(30), [PythonBatch])
