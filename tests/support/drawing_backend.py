"""The fake executor's model on a device of its own: asynchronous, in order, and it draws tokens.

The device is a thread; what it draws with is the plain reference sampler, opened anew for every
sample with nothing but what the step says of it. Rows of logits that the scheduler did not ask for
are NaN in the ring.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from triptych.engine_core.layout import PREVIOUS_SAMPLE, SAMPLE_COLUMNS
from triptych.kernels.reference.sampler import Sampler
from triptych.kernels.sampler_params import NO_TOKEN, SamplerParams, TokenLogprobs
from triptych.services.executor.backend import Backend, BackendFacts, DrawnColumns, Logits
from triptych.services.executor.device_inputs import DeviceInputs
from triptych.services.executor.step_inputs import Ints, StepInputs

Scalar = TypeVar("Scalar", bound=np.generic)
Lie = Literal["none", "few", "outside", "host", "logprobs", "silent"]
"""What is wrong with what it says that it drew: too few tokens, an id outside the vocabulary, a
token of the scheduler's sample, too few logprobs, nothing at all."""


@dataclass(frozen=True)
class _Launched:
    future: "Future[DrawnColumns | None]"
    late: float

    def wait(self) -> DrawnColumns | None:
        drawn = self.future.result()
        time.sleep(self.late)
        return drawn


class DrawingBackend:
    """A PipelinedBackend over another one, whose steps it computes. `late`: seconds that an answer
    takes."""

    def __init__(self, inner: Backend, late: float = 0.0, lie: Lie = "none") -> None:
        self._inner = inner
        self._late = late
        self._lie: Lie = lie
        self._previous: Ints = np.zeros(0, np.int32)
        self._device = ThreadPoolExecutor(1, "device")

    @property
    def facts(self) -> BackendFacts:
        return self._inner.facts

    def reserve(self, max_tokens: int) -> None:
        self._inner.reserve(max_tokens)

    def execute(self, inputs: StepInputs, logits: Logits) -> None:
        self._inner.execute(inputs, logits)

    def register(self, step_ring: memoryview, logits_ring: memoryview) -> None:
        """Nothing is pinned."""

    def unregister(self) -> None:
        """Nothing is unpinned. In the next session, which refers to no step of this one, it says
        the truth."""
        self._previous = np.zeros(0, np.int32)
        self._lie = "none"

    def launch(self, inputs: StepInputs, device: DeviceInputs, logits: Logits) -> _Launched:
        return _Launched(self._device.submit(self._run, inputs, device, logits), self._late)

    def _run(self, inputs: StepInputs, device: DeviceInputs, logits: Logits) -> DrawnColumns | None:
        previous, self._previous = self._previous, np.full(device.num_samples, NO_TOKEN, np.int32)
        # Whose token could not be drawn is nobody any more: any token will do.
        token_ids = np.maximum(_resolved(inputs.token_ids, previous), 0)
        resolved = replace(inputs, token_ids=token_ids)
        computed = np.full((inputs.num_logits, logits.shape[1]), np.nan, np.float32)
        self._inner.execute(resolved, computed)
        logits[:] = np.nan
        wanted = device.host_logits if device.num_samples else np.arange(inputs.num_logits)
        logits[wanted] = computed[wanted]
        if not device.num_samples:
            return None
        assert device.vocabulary_size <= logits.shape[1]
        drawn = draw_samples(device, computed, _resolved(device.history, previous))
        self._previous = drawn.token_ids
        return _told(drawn, device, self._lie)


def draw_samples(device: DeviceInputs, logits: Logits, history: Ints) -> DrawnColumns:
    """What a device draws from a step's rows of logits; `history` has no unknown token."""
    token_ids = np.full(device.num_samples, NO_TOKEN, np.int32)
    reported: list[TokenLogprobs] = []
    for sample, row in enumerate(device.sample_rows.tolist()):
        if row < 0:
            continue
        start, end = device.history_starts[sample : sample + 2].tolist()
        middle = start + int(device.history_prompts[sample])
        params, position = _params_of(device.sample_params[sample])
        output = history[middle:end].tolist()
        if params.repetition_penalty == 1 and not (
            params.presence_penalty or params.frequency_penalty
        ):
            assert start == end, "a history without a penalty"
            output = [0] * position  # only how many there are matters
        assert len(output) == position, "a history of another length"
        sampler = Sampler(device.vocabulary_size)
        sampler.open(0, params, history[start:middle].tolist(), output)
        found = sampler.draw(logits, [0], [row])
        token_ids[sample] = found.token_ids[0]
        reported += found.logprobs.values()
    return DrawnColumns(
        token_ids=token_ids,
        logprobs=np.array([each.logprob for each in reported], np.float32),
        ranks=np.array([each.rank for each in reported], np.int32),
        top_counts=np.array([len(each.top_ids) for each in reported], np.int32),
        top_ids=_joined([each.top_ids for each in reported], np.int32),
        top_logprobs=_joined([each.top_logprobs for each in reported], np.float32),
    )


def _joined(parts: list[NDArray[Scalar]], dtype: type[Scalar]) -> NDArray[Scalar]:
    return np.concatenate([np.zeros(0, dtype), *parts])


def _resolved(token_ids: Ints, previous: Ints) -> Ints:
    """With what the step before drew."""
    resolved = token_ids.copy()
    unknown = token_ids <= PREVIOUS_SAMPLE
    resolved[unknown] = previous[PREVIOUS_SAMPLE - token_ids[unknown]]
    return resolved


def _params_of(row: Ints) -> tuple[SamplerParams, int]:
    """The parameters and the position that a row of sample_params has."""
    values = dict(zip(SAMPLE_COLUMNS, row.tolist(), strict=True))
    bits = dict(zip(SAMPLE_COLUMNS, row.view(np.float32).tolist(), strict=True))
    seed = (values["seed_high"] & 0xFFFF_FFFF) << 32 | values["seed_low"] & 0xFFFF_FFFF
    params = SamplerParams(
        temperature=bits["temperature"],
        top_p=bits["top_p"],
        min_p=bits["min_p"],
        repetition_penalty=bits["repetition_penalty"],
        presence_penalty=bits["presence_penalty"],
        frequency_penalty=bits["frequency_penalty"],
        top_k=values["top_k"],
        seed=seed,
        choice=values["choice"],
        logprobs=values["logprobs"],
    )
    return params, values["position"]


def _told(drawn: DrawnColumns, device: DeviceInputs, lie: Lie) -> DrawnColumns | None:
    match lie:
        case "few":
            return replace(drawn, token_ids=drawn.token_ids[:-1])
        case "outside":
            outside = np.full_like(drawn.token_ids, device.vocabulary_size)
            return replace(drawn, token_ids=outside)
        case "host":
            return replace(drawn, token_ids=np.maximum(drawn.token_ids, 0))
        case "logprobs":
            return replace(drawn, logprobs=drawn.logprobs[1:])
        case "silent":
            return None
        case _:
            return drawn
