"""What the C++ batch returns, named as engine_core.batch names it: neither knows the other, and
tuples of one shape are equal."""

from array import array
from typing import NamedTuple


class Match(NamedTuple):
    """Tokens of a text that are cached, and further ones that are about to be."""

    computed: int
    pending: int


class ScheduledSequence(NamedTuple):
    """A row: compute tokens [start, start + num_tokens); `samples`: the next one is drawn."""

    sequence_id: int
    start: int
    num_tokens: int
    samples: bool


class Score(NamedTuple):
    """Logits rows from `logits_row` on are those of `num_positions` tokens from `position` on."""

    sequence_id: int
    logits_row: int
    position: int
    num_positions: int


class Extent(NamedTuple):
    """Of a step ahead; all 0 where there is none."""

    num_rows: int
    num_tokens: int
    num_logits: int


class Outcome(NamedTuple):
    """What a step meant, in columns: int32, int64, int32, uint8; then who finished, and with how
    many tokens."""

    samples: "array[int]"
    request_ids: "array[int]"
    token_ids: "array[int]"
    finishes: "array[int]"
    finished: list[int]
    finished_tokens: list[int]
