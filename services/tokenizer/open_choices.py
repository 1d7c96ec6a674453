"""What is kept of every choice until it ends, so that the next scheduler can go on where the last
one stopped: its request, its sink, and its tokens so far.

A request none of whose choices has a token goes out again as it was; otherwise each open choice
goes out alone, with its tokens. Both under the slots that they had: a slot is never another
choice's. A beam search goes out again as a whole, and what it had found is dropped unseen: its
hypotheses are handed on when they have ended.
"""

from array import array
from collections.abc import Sequence

from triptych.services.tokenizer.token_sink import TokenSink
from triptych.services.tokenizer.whole_choice import WholeChoice
from triptych.services.transport.wire import pack_u32
from triptych.v1 import stage_pb2

MOST_SCHEDULERS = 4
"""So many in a row may be lost with a choice before its next token, soon after they had it."""

LATE = 0.25
"""What one counts that was lost later: rather of something else, but not for ever."""

_U32 = "I"
_SLOTS = 2**32


class OpenChoice:
    """A choice that has not ended. `given`: a scheduler has had it. `lost`: schedulers in a row
    that were lost with it."""

    __slots__ = (
        "_had", "_is_there", "_suspicion", "given", "index", "lost", "request", "sink", "token_ids"
    )  # fmt: skip

    def __init__(self, request: "OpenRequest", index: int, sink: TokenSink) -> None:
        self.request = request
        self.index = index
        self.sink = sink
        self.token_ids: array[int] = array(_U32)
        self.given = False
        self._is_there = False  # the scheduler of now has it
        self._had = 0  # tokens when it got it
        self.lost = 0
        self._suspicion = 0.0  # what they count

    @property
    def slot(self) -> int:
        """Its name on the connection."""
        return self.request.submit.slot + self.index

    @property
    def choices(self) -> "list[OpenChoice]":
        """Itself, unless it has ended."""
        return [self] if self.index in self.request.by_index else []

    def message(self, now: float) -> stage_pb2.Submit:
        """The Submit of it alone: its tokens are what a scheduler goes on from."""
        submit = self.request.message(now)
        submit.slot, submit.choice = self.slot, submit.choice + self.index
        submit.params.n = 1
        submit.output_token_ids = pack_u32(self.token_ids)
        if self.request.scored >= len(submit.prompt_token_ids) // 4 - 1:
            submit.params.ClearField("prompt_logprobs")
        return submit

    def give(self) -> None:
        """A scheduler has it now."""
        if isinstance(self.sink, WholeChoice):
            self.sink.begin_again()
            del self.token_ids[:]
        self.given = self._is_there = True
        self._had = len(self.token_ids)

    def take_back(self, *, suspicion: float) -> bool:
        """The scheduler is gone; `suspicion`: how likely this is what it died of, 0 to 1. Whether
        no other one gets it."""
        if len(self.token_ids) > self._had:
            self.lost, self._suspicion = 0, 0.0
        elif self._is_there and suspicion:
            self.lost += 1
            self._suspicion += suspicion
        self._is_there = False
        return self._suspicion >= MOST_SCHEDULERS


class OpenRequest:
    """A request with choices that have not ended. `begun`: when it was submitted first, in seconds.

    `scored`: prompt tokens from the second on whose logprobs are here, without a gap.
    """

    __slots__ = ("begun", "by_index", "scored", "submit")

    def __init__(self, submit: stage_pb2.Submit, sinks: Sequence[TokenSink], begun: float) -> None:
        self.submit = submit
        self.begun = begun
        self.scored = 0
        if submit.params.HasField("beam"):
            sinks = [WholeChoice(sink) for sink in sinks]
        self.by_index = {index: OpenChoice(self, index, sink) for index, sink in enumerate(sinks)}

    @property
    def slots(self) -> range:
        """Of all its choices, those that have ended too."""
        return range(self.submit.slot, self.submit.slot + self.submit.params.n)

    @property
    def choices(self) -> list[OpenChoice]:
        """Those that have not ended."""
        return [*self.by_index.values()]

    def parts(self) -> "list[OpenRequest | OpenChoice]":
        """What goes out again, one Submit each."""
        whole = len(self.by_index) == self.submit.params.n and not any(
            choice.token_ids for choice in self.choices
        )
        if whole or self.submit.params.HasField("beam"):
            return [self]
        return [*self.choices]

    def message(self, now: float) -> stage_pb2.Submit:
        """The Submit of the request as it was."""
        submit = stage_pb2.Submit()
        submit.CopyFrom(self.submit)
        submit.accepted = any(choice.given for choice in self.choices)
        submit.age_ms = min(self.age_ms(now), _SLOTS - 1)
        return submit

    def age_ms(self, now: float) -> int:
        """Since it was submitted first."""
        return int(max(0.0, now - self.begun) * 1000)

    def timed_out(self, now: float) -> str | None:
        """Which of its time-outs has passed; the queue's only where no scheduler had it."""
        age, submit = self.age_ms(now), self.submit
        if 0 < submit.timeout_ms < age:
            return f"timeout_ms {submit.timeout_ms}"
        if 0 < submit.queue_timeout_ms < age and not any(each.given for each in self.choices):
            return f"queue_timeout_ms {submit.queue_timeout_ms}"
        return None

    def give(self) -> None:
        """A scheduler has it now."""
        for choice in self.choices:
            choice.give()

    def scored_up_to(self, position: int, count: int) -> None:
        """Logprobs of the prompt tokens [position, position + count) are here."""
        if position - 1 <= self.scored:
            self.scored = max(self.scored, position - 1 + count)


class OpenChoices:
    """All of them, in the order in which their requests came. Event loop only."""

    def __init__(self) -> None:
        self.by_slot: dict[int, OpenChoice] = {}
        self._requests: dict[int, OpenRequest] = {}  # by first slot
        self._next_slot = 1

    def __len__(self) -> int:
        return len(self.by_slot)

    @property
    def requests(self) -> list[OpenRequest]:
        """In the order in which they came."""
        return [*self._requests.values()]

    def add(self, submit: stage_pb2.Submit, sinks: Sequence[TokenSink], now: float) -> OpenRequest:
        """A new request, one sink for each choice; its slots are chosen here."""
        slots = self._free_slots(len(sinks))
        submit.slot = slots.start
        request = OpenRequest(submit, sinks, now)
        self._requests[slots.start] = request
        self.by_slot.update(zip(slots, request.choices, strict=True))
        self._next_slot = slots.stop
        return request

    def remove(self, slot: int) -> OpenChoice | None:
        """The choice has ended, or nobody waits for it; None when that was known."""
        choice = self.by_slot.pop(slot, None)
        if choice is not None:
            request = choice.request
            del request.by_index[choice.index]
            if not request.by_index:
                del self._requests[request.submit.slot]
        return choice

    def _free_slots(self, count: int) -> range:
        """The next in line; none of the last 2^32 is used again."""
        slots = range(self._next_slot, self._next_slot + count)
        if slots.stop > _SLOTS:
            slots = range(1, 1 + count)
        while taken := [slot for slot in slots if slot in self.by_slot]:
            slots = range(taken[-1] + 1, taken[-1] + 1 + count)
        return slots
