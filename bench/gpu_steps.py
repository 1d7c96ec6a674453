"""Steps of a back-end of a device, made as the scheduler makes them, and their times."""

import statistics
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from triptych.engine_core.layout import PREVIOUS_SAMPLE, SAMPLE_COLUMNS
from triptych.services.executor.backend import LaunchedStep
from triptych.services.executor.device.backend import DeviceBackend
from triptych.services.executor.device.device import Device, Work
from triptych.services.executor.device_inputs import DeviceInputs
from triptych.services.executor.step_inputs import StepInputs

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Decoding:
    """R sequences that decode, each `context` tokens long, with blocks of their own."""

    backend: DeviceBackend
    rows: int
    context: int
    temperature: float = 0.0

    def step(self, number: int) -> tuple[StepInputs, DeviceInputs]:
        """The number-th step, 0 first: its tokens are those that the step before drew."""
        facts = self.backend.facts
        position, rows = self.context + number, np.arange(self.rows, dtype=np.int32)
        per_row = facts.num_blocks // self.rows
        tables = (rows[:, None] * per_row + np.arange(per_row)[None, :]).astype(np.int32)
        used = position // facts.block_size
        assert used < per_row, "too few blocks"
        slots = tables[:, used] * facts.block_size + position % facts.block_size
        ids = PREVIOUS_SAMPLE - rows if number else rows % facts.vocabulary_size
        every = np.full(self.rows, 1, np.int32)
        inputs = StepInputs(
            number, ids, every * position, slots, np.arange(self.rows + 1, dtype=np.int32),
            every * (position + 1), rows, _NONE, _NONE, tables[:, : used + 1].copy(),
        )  # fmt: skip
        return inputs, samples(rows, facts.vocabulary_size, position, self.temperature)

    def launch(self, number: int) -> LaunchedStep:
        """Queue it."""
        inputs, device = self.step(number)
        return self.backend.launch(inputs, device, no_logits(self.backend))


def samples(rows: Ints, vocabulary: int, position: int, temperature: float) -> DeviceInputs:
    """One of each row."""
    params = np.zeros((len(rows), len(SAMPLE_COLUMNS)), np.int32)
    floats = {"temperature": temperature, "top_p": 1.0, "repetition_penalty": 1.0}
    for place, name in enumerate(SAMPLE_COLUMNS):
        params[:, place] = np.float32(floats.get(name, 0.0)).view(np.int32)
    params[:, SAMPLE_COLUMNS.index("seed_low")] = rows
    params[:, SAMPLE_COLUMNS.index("position")] = position
    params[:, SAMPLE_COLUMNS.index("logprobs")] = -1
    return DeviceInputs(
        store_sources=_NONE, store_targets=_NONE, load_sources=_NONE, load_targets=_NONE,
        sample_rows=rows, sample_params=params,
        history_starts=np.zeros(len(rows) + 1, np.int32), history_prompts=np.zeros_like(rows),
        history=_NONE, host_logits=_NONE, vocabulary_size=vocabulary,
    )  # fmt: skip


def no_logits(backend: DeviceBackend) -> Floats:
    """A logits ring of which nothing is used: pages that are never touched."""
    return np.empty((1024, backend.facts.vocabulary_size), np.float32)


def prefill(backend: DeviceBackend, tokens: int) -> tuple[StepInputs, DeviceInputs]:
    """A prompt in one step, of which the last token is sampled."""
    facts = backend.facts
    blocks = -(-tokens // facts.block_size)
    assert blocks <= facts.num_blocks, "too few blocks"
    places = np.arange(tokens, dtype=np.int32)
    one = np.zeros(1, np.int32)
    inputs = StepInputs(
        0, places % facts.vocabulary_size, places, places, np.array([0, tokens], np.int32),
        one + tokens, one + tokens - 1, _NONE, _NONE, np.arange(blocks, dtype=np.int32)[None, :],
    )  # fmt: skip
    return inputs, samples(one, facts.vocabulary_size, 0, 0.0)


def decode_seconds(decoding: Decoding, steps: int, warm: int = 3) -> float:
    """Of a step, the median of groups, two in flight as in the engine."""
    flying: deque[LaunchedStep] = deque()
    ends: list[float] = []
    for number in range(warm + steps):
        flying.append(decoding.launch(number))
        if len(flying) == 2:
            flying.popleft().wait()
            ends.append(time.perf_counter())
    flying.pop().wait()
    return statistics.median(np.diff(ends[warm - 1 :]).tolist())


def prefill_seconds(backend: DeviceBackend, tokens: int, rounds: int) -> float:
    """Of a whole prompt, the median."""
    inputs, device = prefill(backend, tokens)
    times = []
    for _ in range(1 + rounds):
        start = time.perf_counter()
        backend.launch(inputs, device, no_logits(backend)).wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def idle_share(decoding: Decoding, steps: int) -> float | None:
    """The part of the time in which no kernel and no copy ran, by the device's own clock.

    None where there is no device to ask. Being watched slows launches down: an upper bound.
    """
    if not torch.cuda.is_available():
        return None
    from torch.profiler import ProfilerActivity, profile

    decode_seconds(decoding, 3)
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        decode_seconds(decoding, steps)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in watched.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    if not spans:
        return None
    busy, until = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return 1.0 - busy / (until - spans[0][0])


def copy_bandwidth(device: Device, size: int) -> float:
    """Bytes per second, read and written, of a copy within the device."""
    source = device.zeros((size // 4,), torch.float32)
    target = device.zeros((size // 4,), torch.float32)
    return 2 * size / _seconds(device, lambda: target.copy_(source))


def matmul_rate(device: Device, size: int, dtype: torch.dtype) -> float:
    """Operations per second of the vendor's product of two random square matrices."""
    left, right, out = (device.empty((size, size), dtype) for _ in range(3))

    def fill() -> None:
        left.normal_()
        right.normal_()

    device.run(fill)
    return 2 * size**3 / _seconds(device, lambda: torch.mm(left, right, out=out))


def _seconds(device: Device, work: Work, rounds: int = 10) -> float:
    best = float("inf")
    for _ in range(3):
        device.synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            device.run(work)
        device.synchronize()
        best = min(best, (time.perf_counter() - start) / rounds)
    return best
