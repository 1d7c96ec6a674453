"""What the C++ batch returns, named as engine_core.batch names it: neither knows the other, and
tuples of one shape are equal."""

from array import array
from typing import NamedTuple


class Match(NamedTuple):
    """Tokens of a text that are cached, and further ones that are about to be."""

    computed: int
    pending: int


class Score(NamedTuple):
    """Logits rows from `logits_row` on are those of `num_positions` tokens from `position` on."""

    sequence_id: int
    logits_row: int
    position: int
    num_positions: int


class Outcome(NamedTuple):
    """What a step meant, in columns over its samples: int64, int32, uint8; then who finished, and
    with how many tokens."""

    request_ids: "array[int]"
    token_ids: "array[int]"
    finishes: "array[int]"
    finished: list[int]
    finished_tokens: list[int]
