"""What a device drew, on its way to the host: pinned memory, and the step that waits for it."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from triptych.engine_core.layout import SAMPLE_COLUMNS
from triptych.kernels.sampler_params import NO_LOGPROBS, NO_TOKEN
from triptych.services.executor.backend import DrawnColumns
from triptych.services.executor.device.device import Device, DeviceMemoryError, Event
from triptych.services.executor.device.step_buffers import StepBuffers, score_count, score_views
from triptych.services.executor.device_inputs import DeviceInputs

Number = TypeVar("Number", np.int32, np.float32)

_LOGPROBS = SAMPLE_COLUMNS.index("logprobs")


@dataclass(frozen=True, slots=True)
class _HostResults:
    tokens: torch.Tensor  # int32 [samples]
    scores: torch.Tensor  # int32, packed as StepBuffers.scores


class ResultMemory:
    """Pinned memory for the results of the steps in flight, used again and again."""

    def __init__(self, device: Device, max_samples: int) -> None:
        self._device = device
        self._samples = max_samples
        # By two threads. Pinning takes long: for two steps in flight, and one more.
        self._free = deque(self._made() for _ in range(3))

    def take(self) -> _HostResults:
        """Memory of one step. Raises DeviceMemoryError when the host has no more."""
        try:
            return self._free.pop()
        except IndexError:
            return self._made()

    def give_back(self, results: _HostResults) -> None:
        """Its step is over."""
        self._free.append(results)

    def _made(self) -> _HostResults:
        return _HostResults(
            self._device.pinned((self._samples,), torch.int32),
            self._device.pinned((score_count(self._samples),), torch.int32),
        )


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be brought back of a step: `asked` are the top counts that samples ask for."""

    num_samples: int
    asked: npt.NDArray[np.int32]

    @classmethod
    def of(cls, device: DeviceInputs) -> "Request":
        """Of a step's samples; those that the host draws ask for nothing here."""
        asked = np.where(device.sample_rows < 0, NO_LOGPROBS, device.sample_params[:, _LOGPROBS])
        return cls(device.num_samples, asked.astype(np.int32))

    @property
    def logprobs(self) -> bool:
        """Whether any sample wants them."""
        return bool((self.asked > NO_LOGPROBS).any())


class Results:
    """The results of one step: queued behind it, then read."""

    def __init__(self, memory: ResultMemory, device: Device, request: Request) -> None:
        self._memory = memory
        self._device = device
        self._request = request
        self._host = memory.take()

    def queue(self, buffers: StepBuffers) -> None:
        """Queue the copies to the host."""
        count = self._request.num_samples
        self._device.download(buffers.previous[:count], self._host.tokens[:count])
        if self._request.logprobs:
            size = score_count(count)
            self._device.download(buffers.scores[:size], self._host.scores[:size])

    def columns(self) -> DrawnColumns:
        """What was drawn, once the copies are done; once."""
        count = self._request.num_samples
        tokens = self._host.tokens[:count].numpy().copy()
        asking = np.flatnonzero((self._request.asked > NO_LOGPROBS) & (tokens != NO_TOKEN))
        scores = score_views(self._host.scores, count)
        counts = scores.top_counts.numpy()[asking]
        columns = DrawnColumns(
            token_ids=tokens,
            logprobs=scores.logprobs.numpy()[asking],
            ranks=scores.ranks.numpy()[asking],
            top_counts=counts,
            top_ids=_ragged(scores.top_ids.numpy()[asking], counts),
            top_logprobs=_ragged(scores.top_logprobs.numpy()[asking], counts),
        )
        self._memory.give_back(self._host)
        return columns


class DeviceStep:
    """As `LaunchedStep`."""

    def __init__(
        self, event: Event, results: Results | None, explain: Callable[[Exception], Exception]
    ) -> None:
        """`explain` gives the error to raise for one of the device's."""
        self._event = event
        self._results = results
        self._explain = explain

    def wait(self) -> DrawnColumns | None:
        """As `LaunchedStep.wait`."""
        try:
            self._event.wait()
        except DeviceMemoryError as error:
            raise self._explain(error) from error
        return None if self._results is None else self._results.columns()


def _ragged(rows: npt.NDArray[Number], counts: npt.NDArray[np.int32]) -> npt.NDArray[Number]:
    """The first counts[i] of each row, one after another."""
    return rows[np.arange(rows.shape[1]) < counts[:, None]]
