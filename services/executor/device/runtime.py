"""All that a device needs to compute steps up to a size: buffers, the program over them, graphs."""

import numpy as np

from triptych.engine_core.layout import MAX_SAMPLE_LOGPROBS, SAMPLE_COLUMNS
from triptych.services.executor.device.buckets import Buckets
from triptych.services.executor.device.capacity import StepCapacity
from triptych.services.executor.device.device import Device, Work
from triptych.services.executor.device.graphs import Graphs, capture_graphs
from triptych.services.executor.device.network import Network
from triptych.services.executor.device.program import Program
from triptych.services.executor.device.results import Request, ResultMemory
from triptych.services.executor.device.static_inputs import StaticInputs
from triptych.services.executor.device.step_buffers import BufferShape, StepBuffers, step_buffers
from triptych.services.executor.device_inputs import DeviceInputs
from triptych.services.executor.step_inputs import StepInputs

_NONE = np.empty(0, np.int32)
NO_DEVICE_INPUTS = DeviceInputs(
    store_sources=_NONE,
    store_targets=_NONE,
    load_sources=_NONE,
    load_targets=_NONE,
    sample_rows=_NONE,
    sample_params=np.empty((0, len(SAMPLE_COLUMNS)), np.int32),
    history_starts=_NONE,
    history_prompts=_NONE,
    history=_NONE,
    host_logits=_NONE,
    vocabulary_size=0,
)
"""Of a step that only computes logits, all of them for the host."""


class Runtime:
    """Buffers for steps of a capacity. The launching thread only."""

    def __init__(
        self, device: Device, network: Network, shape: BufferShape, capacity: StepCapacity
    ) -> None:
        """Raises DeviceMemoryError."""
        self.capacity = capacity
        self.buffers: StepBuffers = step_buffers(device, network.ops, shape, capacity)
        self.results = ResultMemory(device, capacity.samples)
        self.graphs = Graphs.none()
        self._device = device
        self._inputs = StaticInputs(device, capacity)
        self._program = Program(network, self.buffers)
        self._block_size = int(network.cache[0].keys.shape[1])
        network.collectives.reserve(
            max(
                self.buffers.activations.residual.nbytes,
                self.buffers.activations.logits_part.nbytes,
            )
        )

    def capture(self, buckets: Buckets) -> None:
        """Capture the graphs of decode steps. Raises DeviceMemoryError, DeviceError."""
        self._inputs.clear()  # each runs once before it is captured
        self.graphs = capture_graphs(self._device, buckets, self._decode)

    def queue_decode(self) -> None:
        """Queue a decode step of one row, eagerly, whatever lies in its places."""
        self._device.run(self._decode(1))

    def queue(self, inputs: StepInputs, device: DeviceInputs, vocabulary_size: int) -> None:
        """Queue a step that fits: its inputs, its tokens, its samples."""
        bucket = None
        if inputs.num_tokens == inputs.num_rows:
            bucket = self.graphs.bucket_for(inputs.num_rows)
        step = self._inputs.upload(inputs, device, self._block_size, padded=bucket is not None)
        if bucket is None:
            self._device.run(self._program.forward(step))
        else:
            self.graphs.by_rows[bucket].replay()
        if device.num_samples:
            most = min(device.vocabulary_size or vocabulary_size, vocabulary_size)
            self._device.run(self._program.sampling(step, Request.of(device), most))

    def _decode(self, num_rows: int) -> Work:
        return self._program.forward(self._inputs.fixed(num_rows))


def largest_step(
    capacity: StepCapacity, max_model_len: int, block_size: int
) -> tuple[StepInputs, DeviceInputs]:
    """A step that takes as much memory as any of the capacity, and all kernels but decoding's, over
    one sequence's blocks: all its rows read the same ones, and none is stored to."""
    longest = min(capacity.tokens, max_model_len)
    starts = np.array([*range(0, capacity.tokens, longest), capacity.tokens], np.int32)
    counts = np.diff(starts)
    blocks = -(-longest // block_size)
    num_logits = min(capacity.logits, capacity.tokens)
    positions = np.arange(capacity.tokens, dtype=np.int32) - np.repeat(starts[:-1], counts)
    inputs = StepInputs(
        step_id=0,
        token_ids=np.zeros(capacity.tokens, np.int32),
        positions=positions,
        slots=np.full(capacity.tokens, -1, np.int32),
        row_starts=starts,
        kv_lengths=counts.astype(np.int32),
        logits_tokens=np.arange(num_logits, dtype=np.int32),
        copy_sources=_NONE,
        copy_targets=_NONE,
        block_tables=np.tile(np.arange(blocks, dtype=np.int32), (len(counts), 1)),
    )
    samples = min(capacity.samples, num_logits)
    params = np.zeros((samples, len(SAMPLE_COLUMNS)), np.int32)
    for name, value in (
        ("temperature", 1.0), ("top_p", 0.9), ("min_p", 0.1), ("repetition_penalty", 1.1),
    ):  # fmt: skip
        params[:, SAMPLE_COLUMNS.index(name)] = np.float32(value).view(np.int32)
    for name, number in (("top_k", 50), ("logprobs", MAX_SAMPLE_LOGPROBS)):
        params[:, SAMPLE_COLUMNS.index(name)] = number
    device = DeviceInputs(
        store_sources=_NONE,
        store_targets=_NONE,
        load_sources=_NONE,
        load_targets=_NONE,
        sample_rows=np.arange(samples, dtype=np.int32),
        sample_params=params,
        history_starts=np.zeros(samples + 1, np.int32),
        history_prompts=np.zeros(samples, np.int32),
        history=_NONE,
        host_logits=_NONE,
        vocabulary_size=0,
    )
    return inputs, device
