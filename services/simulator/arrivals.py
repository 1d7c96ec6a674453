"""A trace: who comes when, and with how much to do."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

NO_GROUP = -1


class Arrival(NamedTuple):
    """A request `at` seconds after the start.

    The first `num_prefix` of its `num_prompt` tokens are those of all requests of `prefix_group`.
    Tokens are made from these numbers (prompts.py) unless `prompt_token_ids` has them.
    """

    at: float
    num_prompt: int
    num_output: int
    priority: int = 0
    tenant: str = ""
    prefix_group: int = NO_GROUP
    num_prefix: int = 0
    prompt_token_ids: tuple[int, ...] = ()


class Trace(Protocol):
    """Arrivals in the order of time, given out once."""

    def __iter__(self) -> Iterator[Arrival]: ...

    @property
    def fraction(self) -> float:
        """How much of it has been given out, 0 to 1."""
        ...
