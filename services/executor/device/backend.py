"""A model on a device as a back-end: steps are queued one behind the other, and waited for.

The order within a step: blocks to host memory, blocks from there, copies of blocks, tokens, logits,
samples, and what goes to the host.
"""

import logging
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch

from triptych.services.executor.backend import (
    BackendFacts,
    BackendOptions,
    DeviceFacts,
    LaunchedStep,
    Logits,
    Progress,
)
from triptych.services.executor.collectives import ALONE, Collectives
from triptych.services.executor.device.capacity import StepCapacity
from triptych.services.executor.device.device import DeviceMemoryError, Work
from triptych.services.executor.device.host_storage import HostStorage, queue_copies
from triptych.services.executor.device.kv_cache import KvCache
from triptych.services.executor.device.loading import DeviceModel, load_device_model
from triptych.services.executor.device.memory_profile import KNOBS
from triptych.services.executor.device.opening import open_device
from triptych.services.executor.device.results import DeviceStep, Request, Results
from triptych.services.executor.device.runtime import NO_DEVICE_INPUTS, Runtime
from triptych.services.executor.device.sizing import device_blocks, host_blocks, network_of
from triptych.services.executor.device.warm_up import warm_steps
from triptych.services.executor.device_inputs import DeviceInputs
from triptych.services.executor.step_inputs import Ints, StepInputs
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import ModelFiles

_log = logging.getLogger(__name__)


def open_device_backend(
    files: ModelFiles,
    options: BackendOptions,
    progress: Progress,
    collectives: Collectives = ALONE,
) -> "DeviceBackend":
    """Load a rank's part of a model onto its device, and make room for its cache and its steps.

    By the thread that will launch. Raises StartupError when the model cannot be run there.
    """
    device = open_device(options.device, options.rank, options.tensor_parallel_size)
    if options.device == "emulated" and options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        model = load_device_model(files, options, progress, collectives, device)
        blocks, hosted = collectives.minimum((device_blocks(model), host_blocks(model)))
        device.trim()
        return DeviceBackend(model, blocks, hosted)
    except DeviceMemoryError as error:
        raise StartupError(f"{files.path}: {error}; {KNOBS}") from error


class DeviceBackend:
    """As `PipelinedBackend`."""

    def __init__(self, model: DeviceModel, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Make room for the cache and for steps, and capture graphs. Raises DeviceMemoryError."""
        device = model.device
        self._model = model
        self._device = device
        self._cache = KvCache(device, model.kv_form, num_blocks)
        self._host = HostStorage(device, self._cache, num_host_blocks) if num_host_blocks else None
        self._network = network_of(model, self._cache)
        self._runtime = self._make_runtime(model.capacity)
        self._warm_up(num_blocks)
        self._previous = 0  # samples of the step launched last
        self._rings: list[memoryview] = []
        self._facts = _facts(model, num_blocks, num_host_blocks)

    @property
    def facts(self) -> BackendFacts:
        """As `Backend.facts`."""
        return self._facts

    def device_facts(self) -> DeviceFacts:
        """As `MeasuredBackend.device_facts`."""
        graphs, host = self._runtime.graphs, self._host
        return DeviceFacts(
            num_graphs=len(graphs.by_rows),
            graph_bytes=graphs.num_bytes,
            peak_memory_bytes=self._device.memory().peak,
            blocks_stored=0 if host is None else host.blocks_stored,
            blocks_loaded=0 if host is None else host.blocks_loaded,
        )

    def reserve(self, max_tokens: int) -> None:
        """As `Backend.reserve`."""
        capacity = self._runtime.capacity
        if max_tokens > capacity.tokens:
            self._grow(capacity.with_tokens(max_tokens))

    def register(self, step_ring: memoryview, logits_ring: memoryview) -> None:
        """As `PipelinedBackend.register`. Of the step ring nothing is copied by the device."""
        if self._device.register_host(logits_ring):
            self._rings.append(logits_ring)

    def unregister(self) -> None:
        """As `PipelinedBackend.unregister`."""
        self._device.synchronize()
        while self._rings:
            self._device.unregister_host(self._rings.pop())
        self._previous = 0

    def execute(self, inputs: StepInputs, logits: Logits) -> None:
        """As `Backend.execute`: a step that draws nothing, and is waited for."""
        self.launch(inputs, NO_DEVICE_INPUTS, logits).wait()

    def launch(self, inputs: StepInputs, device: DeviceInputs, logits: Logits) -> LaunchedStep:
        """As `PipelinedBackend.launch`."""
        self._check(inputs, device, logits)
        try:
            self._grow(self._runtime.capacity.holding(inputs, device))
            return self._queue(inputs, device, logits)
        except DeviceMemoryError as error:
            raise _explained(error) from error
        finally:
            self._previous = device.num_samples

    def cache_on_the_host(self) -> torch.Tensor:
        """A copy of all keys and values, [layers, 2, blocks, block_size, heads, head_dim]: for
        tests, which look at what a step wrote."""
        data = self._cache.data
        host = torch.empty(data.shape, dtype=data.dtype)
        self._device.download(data, host)
        self._device.synchronize()
        return host

    def close(self) -> None:
        """Give all back; nothing may be in flight."""
        self._device.synchronize()
        self._device.close()

    def _check(self, inputs: StepInputs, device: DeviceInputs, logits: Logits) -> None:
        facts = self._facts
        inputs.check(
            vocabulary_size=facts.vocabulary_size,
            max_model_len=facts.max_model_len,
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            previous_samples=self._previous,
        )
        device.check(
            step_id=inputs.step_id,
            num_blocks=facts.num_blocks,
            num_host_blocks=facts.num_host_blocks,
            previous_samples=self._previous,
        )
        if self._model.collectives.rank == 0:
            inputs.check_room(len(logits))

    def _queue(self, inputs: StepInputs, device: DeviceInputs, logits: Logits) -> DeviceStep:
        if self._host is not None:
            self._host.store(_pairs(device.store_sources, device.store_targets))
            self._host.load(_pairs(device.load_sources, device.load_targets))
        queue_copies(self._device, self._cache, _pairs(inputs.copy_sources, inputs.copy_targets))
        runtime = self._runtime
        runtime.queue(inputs, device, self._facts.vocabulary_size)
        results = None
        if self._model.collectives.rank == 0:
            if device.num_samples:
                results = Results(runtime.results, self._device, Request.of(device))
                results.queue(runtime.buffers)
            self._queue_logits(inputs, device, logits)
        return DeviceStep(self._device.record(), results, _explained)

    def _queue_logits(self, inputs: StepInputs, device: DeviceInputs, logits: Logits) -> None:
        """Bring the rows that the host wants into its ring, neighbours at once."""
        source = self._runtime.buffers.activations.logits
        assert source is not None
        rows = (
            device.host_logits
            if device.num_samples
            else np.arange(inputs.num_logits, dtype=np.int32)
        )
        for start, stop in _runs(rows):
            target = logits[start:stop].data.cast("B")
            shape = (stop - start, logits.shape[1])
            host = self._device.host_view(target, shape, torch.float32)
            self._device.download(source[start:stop], host)

    def _grow(self, capacity: StepCapacity) -> None:
        """Make room for larger steps: other buffers, and graphs over them. Raises DeviceMemoryError
        where there is none; steps of the size before go on."""
        before = self._runtime.capacity
        if capacity == before:
            return
        _log.info("making room for larger steps", extra={"tokens": capacity.tokens})
        self._device.synchronize()
        drawn = self._runtime.buffers.previous.clone()
        del self._runtime  # both do not fit
        self._device.trim()
        try:
            self._runtime = self._make_runtime(capacity)
        except DeviceMemoryError:
            self._device.trim()
            self._runtime = self._make_runtime(before)
            raise
        finally:
            self._device.run(_keeping(drawn, self._runtime.buffers.previous))

    def _warm_up(self, num_blocks: int) -> None:
        """Run steps that use every kernel, so that none is compiled while somebody waits. Where
        nothing is compiled, a small one."""
        model, runtime = self._model, self._runtime
        if not runtime.graphs.by_rows:
            runtime.queue_decode()  # the inputs of no step are padding
        steps = warm_steps(
            runtime.capacity, model.max_model_len, model.options.block_size, num_blocks
        )
        compiles = self._device.kind == "cuda"
        for number, (inputs, sampled) in enumerate(islice(steps, None if compiles else 1)):
            if compiles and number == 0:
                # A tokenizer may have fewer ids than the model, and samplers are compiled for
                # multiples of 16 and for other numbers.
                ids = model.vocabulary_size
                for fewer in {(ids - 1) | 1, max(ids // 16 * 16, 1)} - {ids}:
                    runtime.queue(inputs, sampled, fewer)
            runtime.queue(inputs, sampled, model.vocabulary_size)
        self._device.synchronize()

    def _make_runtime(self, capacity: StepCapacity) -> Runtime:
        model = self._model
        runtime = Runtime(self._device, self._network, model.buffer_shape, capacity)
        runtime.capture(model.buckets)
        return runtime


def _facts(model: DeviceModel, num_blocks: int, num_host_blocks: int) -> BackendFacts:
    return BackendFacts(
        device=model.options.device,
        plan="cudagraph" if model.buckets.sizes else "eager",
        dtype=model.dtype,
        architecture=model.config.architecture,
        model=model.name,
        parameters=model.parameters,
        weight_bytes=model.weight_bytes,
        vocabulary_size=model.vocabulary_size,
        max_model_len=model.max_model_len,
        block_size=model.options.block_size,
        num_blocks=num_blocks,
        kv_cache_bytes=num_blocks * model.kv_form.block_bytes,
        kv_cache_dtype=model.kv_cache_dtype,
        num_host_blocks=num_host_blocks,
    )


def _keeping(drawn: torch.Tensor, previous: torch.Tensor) -> Work:
    def keep() -> None:
        previous[: len(drawn)].copy_(drawn)

    return keep


def _explained(error: Exception) -> DeviceMemoryError:
    """Out of memory, in words that say what to do."""
    return DeviceMemoryError(f"{error}; {KNOBS}")


def _pairs(sources: Ints, targets: Ints) -> list[tuple[int, int]]:
    return list(zip(sources.tolist(), targets.tolist(), strict=True))


def _runs(rows: Ints) -> Iterator[tuple[int, int]]:
    """Ascending rows as ranges of neighbours."""
    values = rows.tolist()
    start = 0
    for at in range(1, len(values) + 1 if values else 0):
        if at == len(values) or values[at] != values[at - 1] + 1:
            yield values[start], values[at - 1] + 1
            start = at
