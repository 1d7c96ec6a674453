"""How many blocks a loaded model may have: of its device's memory, and of the host's."""

from dataclasses import replace

from triptych.services.executor.device.buckets import Buckets
from triptych.services.executor.device.capacity import StepCapacity
from triptych.services.executor.device.graphs import bytes_of_all
from triptych.services.executor.device.kv_cache import KvCache
from triptych.services.executor.device.loading import DeviceModel
from triptych.services.executor.device.memory_profile import blocks_within, measure, most_useful
from triptych.services.executor.device.network import Network
from triptych.services.executor.device.runtime import Runtime, largest_step
from triptych.services.executor.kv_budget import KvBudget, num_blocks_for

_EMULATED_TOKENS = 16
"""Of the step that an emulated device is measured with: it counts buffers, which are of full size
in any case, and a large step takes it seconds."""


def device_blocks(model: DeviceModel) -> int:
    """Blocks of the KV cache. Raises StartupError when there is room for none, DeviceMemoryError
    when not even a step fits."""
    options = model.options
    block_bytes, block_size = model.kv_form.block_bytes, options.block_size
    if options.kv_cache_memory is not None:
        return num_blocks_for(
            block_bytes, block_size, model.max_model_len, KvBudget(options.kv_cache_memory)
        )
    device, capacity = model.device, model.capacity
    trial = KvCache(device, model.kv_form, _blocks_of_a_trial(capacity, model))
    runtime = Runtime(device, network_of(model, trial), model.buffer_shape, capacity)
    tried = capacity
    if device.kind == "emulated":
        tokens = min(capacity.tokens, _EMULATED_TOKENS)
        tried = replace(capacity, tokens=tokens, samples=tokens)
    step, sampled = largest_step(tried, model.max_model_len, block_size)
    need = measure(
        device,
        lambda: runtime.queue(step, sampled, model.vocabulary_size),
        lambda: _graph_bytes(runtime, model.buckets),
    )
    blocks = blocks_within(device.memory(), need, options.gpu_memory_utilization, block_bytes)
    if device.kind == "emulated":
        return min(blocks, most_useful(model.max_model_len, block_size))
    return blocks


def host_blocks(model: DeviceModel) -> int:
    """Blocks of host memory that swap_space pays for."""
    return model.options.swap_space // model.kv_form.block_bytes


def network_of(model: DeviceModel, cache: KvCache) -> Network:
    """The network of a model over a cache."""
    return Network(
        config=model.config,
        form=model.form,
        weights=model.weights,
        cache=cache.layers,
        ops=model.ops,
        collectives=model.collectives,
    )


def _blocks_of_a_trial(capacity: StepCapacity, model: DeviceModel) -> int:
    longest = min(capacity.tokens, model.max_model_len)
    return -(-longest // model.options.block_size)


def _graph_bytes(runtime: Runtime, buckets: Buckets) -> int:
    """What all graphs will take, as the two largest ones do."""
    if not buckets.sizes:
        return 0
    runtime.capture(Buckets(buckets.sizes[-2:]))
    return bytes_of_all(runtime.graphs, len(buckets.sizes))
