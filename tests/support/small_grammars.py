"""Shorthand for tests of running grammars over the small vocabulary of grammar_sources."""

import numpy as np
from llguidance import LLParserLimits
from numpy.typing import NDArray

from grammar_sources import EOS, OTHER_EOS, SmallGrammars
from triptych.engine_core.sampling_params import SamplingParams
from triptych.services.scheduler.running_grammars import RunningGrammars

ENDS = (EOS, OTHER_EOS)
A, B, C, AB, ABC, AA, BB, BA = *b"abc", 137, 138, 139, 140, 141


def params(grammar: str, **fields: object) -> SamplingParams:
    values: dict[str, object] = {"max_tokens": 99, "stop_token_ids": ENDS, "grammar": grammar}
    return SamplingParams(**{**values, **fields})  # type: ignore[arg-type]  # test's shorthand


def grammars(limits: LLParserLimits | None = None) -> RunningGrammars:
    return RunningGrammars(SmallGrammars(limits))


def ids_of(words: NDArray[np.uint32]) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def allowed(running: RunningGrammars, sample: int = 0, sequence_id: int = 1) -> set[int]:
    mask = running.mask(sample, sequence_id)
    assert mask is not None
    return ids_of(mask.words)
