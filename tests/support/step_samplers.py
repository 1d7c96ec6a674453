"""StepSamplers over the small vocabulary, rows with a favourite, and a drafter that listens."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest

from drafted_draws import LogitsOf
from grammar_sources import EOS, OTHER_EOS, SMALL_VOCABULARY, SmallGrammars
from triptych.engine_core.sampling_params import SamplingParams
from triptych.services.scheduler.logits_processors import LogitsProcessor, Row
from triptych.services.scheduler.sampler import StepSampler, new_sampler

ENDS = (EOS, OTHER_EOS)
A, B, C, ABC = *b"abc", 138


class Scribe:
    """A drafter that proposes what it is told to, and writes down what it hears."""

    def __init__(self) -> None:
        self.proposals: dict[int, Sequence[int]] = {}
        self.opened: list[tuple[int, tuple[int, ...], tuple[int, ...], str]] = []
        self.appended: list[tuple[int, int]] = []
        self.closed: list[int] = []
        self.heard: list[tuple[int, int, int]] = []
        self.asked: list[int] = []

    def open(
        self, sequence_id: int, prompt_ids: Sequence[int], output_ids: Sequence[int], salt: str
    ) -> None:
        self.opened.append((sequence_id, tuple(prompt_ids), tuple(output_ids), salt))

    def append(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        self.appended += zip(sequence_ids, token_ids, strict=True)

    def close(self, sequence_id: int) -> None:
        self.closed.append(sequence_id)

    def propose(self, sequence_id: int) -> Sequence[int]:
        self.asked.append(sequence_id)
        return self.proposals.get(sequence_id, ())

    def verified(self, sequence_id: int, drafted: int, accepted: int) -> None:
        self.heard.append((sequence_id, drafted, accepted))


def params(grammar: str = "", **fields: object) -> SamplingParams:
    values: dict[str, object] = {
        "max_tokens": 20, "temperature": 0.0, "stop_token_ids": ENDS, "grammar": grammar,
    }  # fmt: skip
    return SamplingParams(**{**values, **fields})  # type: ignore[arg-type]  # test's shorthand


def step_sampler(
    impl: Literal["native", "python"] = "native", drafter: Scribe | None = None
) -> StepSampler:
    inner = new_sampler(impl, SMALL_VOCABULARY, processed_logprobs=False)
    return StepSampler(inner, {"nothing": _nothing}, SmallGrammars(), drafter)


def _nothing(argument: str) -> LogitsProcessor:
    def process(prompt_ids: Sequence[int], output_ids: Sequence[int], logits: Row) -> None:
        del prompt_ids, output_ids, logits

    assert argument == ""
    return process


def rows(*best: int) -> Row:
    """Each has a first choice, and the next id as its second."""
    matrix = np.zeros((len(best), SMALL_VOCABULARY), np.float32)
    matrix[np.arange(len(best)), best] = 5.0
    matrix[np.arange(len(best)), np.add(best, 1)] = 4.0
    matrix.flags.writeable = False
    return matrix


def always(best: int) -> LogitsOf:
    """The same row behind any tokens."""
    row: Row = rows(best)[0]
    return lambda sequence_id, tokens: row


BOTH = pytest.mark.parametrize("impl", ["native", "python"])
