"""A step's samples from its columns, with the numpy reference of the samplers: the same tokens.

docs/sampling.md says in words what is drawn.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from triptych.engine_core.layout import SAMPLE_COLUMNS
from triptych.kernels.reference.philox import gumbel
from triptych.kernels.reference.sampler_filters import kept
from triptych.kernels.reference.sampler_logprobs import token_logprobs
from triptych.kernels.reference.sequence_state import SequenceState
from triptych.kernels.sampler_params import NO_LOGPROBS, NO_TOKEN, SamplerParams, TokenLogprobs

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

_COLUMN = {name: column for column, name in enumerate(SAMPLE_COLUMNS)}
_FLOATS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ColumnSample:
    """One sample: parameters, and which of its output tokens this one will be."""

    params: SamplerParams
    position: int

    @classmethod
    def of(cls, columns: Ints) -> "ColumnSample":
        """Read a row of sample_params, int32 [len(SAMPLE_COLUMNS)]."""
        numbers = dict(zip(SAMPLE_COLUMNS, columns.tolist(), strict=True))
        floats = columns[[_COLUMN[name] for name in _FLOATS]].view(np.float32).tolist()
        low, high = (numbers[name] & 0xFFFFFFFF for name in ("seed_low", "seed_high"))
        params = SamplerParams(
            **dict(zip(_FLOATS, floats, strict=True)),
            top_k=max(numbers["top_k"], 0),
            seed=high << 32 | low,
            choice=numbers["choice"] & 0xFFFFFFFF,
            logprobs=numbers["logprobs"],
        )
        return cls(params, numbers["position"])

    def draw(self, row: Floats, prompt_ids: Ints, output_ids: Ints) -> int:
        """A token by logits [vocabulary]; NO_TOKEN where they are not finite, or allow none."""
        if not drawable(row):
            return NO_TOKEN
        params = self.params
        row = SequenceState(params, len(row), prompt_ids, output_ids).modified(row, None)
        if not drawable(row):
            return NO_TOKEN
        order = _likeliest_first(row)
        if params.temperature <= 0.0:
            return int(order[0])
        distance = _distance(row, order, params.temperature)
        places = kept(
            row, order, distance,
            top_n_sigma=0.0, top_k=params.top_k, typical_p=1.0,
            top_p=params.top_p, min_p=params.min_p,
        )  # fmt: skip
        order, distance = order[places], distance[places]
        score = gumbel(order, params.seed, params.choice, self.position) - distance
        return int(order[score == score.max()].min())

    def logprobs(self, row: Floats, token: int) -> TokenLogprobs | None:
        """Of a token that was drawn, by the model's own logits; None where nobody asks."""
        if self.params.logprobs == NO_LOGPROBS or token == NO_TOKEN:
            return None
        order = _likeliest_first(row)
        return token_logprobs(order, _distance(row, order, 1.0), token, self.params.logprobs)


def drawable(row: Floats) -> bool:
    """Whether a token can be drawn from logits: none is NaN or infinite, one is above -inf."""
    return bool((row < np.inf).all() and (row > -np.inf).any())


def _likeliest_first(row: Floats) -> npt.NDArray[np.int64]:
    order = np.argsort(-row, kind="stable")
    return order[row[order] > -np.inf]


def _distance(
    row: Floats, order: npt.NDArray[np.int64], temperature: float
) -> npt.NDArray[np.float64]:
    ordered = row[order].astype(np.float64)
    distance: npt.NDArray[np.float64] = (ordered[0] - ordered) * (1.0 / temperature)
    return distance
