"""A model onto a device: what is refused by name, which operations compute it, how it is loaded."""

import logging
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from triptych.services.executor.backend import BackendOptions
from triptych.services.executor.collectives import Collectives
from triptych.services.executor.device.buckets import Buckets
from triptych.services.executor.device.capacity import StepCapacity
from triptych.services.executor.device.device import Device
from triptych.services.executor.device.kv_cache import KvForm
from triptych.services.executor.device.network import NetworkForm, NetworkWeights
from triptych.services.executor.device.ops import Ops
from triptych.services.executor.device.reference_ops import ReferenceOps
from triptych.services.executor.device.shard import Shard
from triptych.services.executor.device.step_buffers import BufferShape
from triptych.services.executor.device.weights import WeightLoader, network_form, parameters_of
from triptych.services.executor.model_config import ModelConfig
from triptych.services.executor.raw_weights import RawWeights, open_raw_weights
from triptych.services.executor.weights import Progress
from triptych.services.runtime.model_files import ModelFiles

Dtype = Literal["float32", "bfloat16"]

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}

_LARGEST_HEAD = 256

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """A rank's weights on its device, and every choice that was made for it."""

    name: str
    config: ModelConfig
    device: Device
    ops: Ops
    collectives: Collectives
    options: BackendOptions
    form: NetworkForm
    weights: NetworkWeights
    dtype: Dtype
    kv_cache_dtype: str
    max_model_len: int
    parameters: int
    weight_bytes: int

    @property
    def vocabulary_size(self) -> int:
        """As `LoadedModel.vocabulary_size`."""
        return self.config.vocabulary_size

    @property
    def kv_form(self) -> KvForm:
        """What a block of this rank holds."""
        dtype = DTYPES[self.kv_cache_dtype]
        return KvForm.of(self.form, self.config.num_layers, self.options.block_size, dtype)

    @property
    def buffer_shape(self) -> BufferShape:
        """What sizes of buffers depend on beside the step."""
        return BufferShape(
            config=self.config,
            form=self.form,
            dtype=DTYPES[self.dtype],
            max_model_len=self.max_model_len,
            shard=Shard(self.collectives.rank, self.collectives.size),
        )

    @property
    def capacity(self) -> StepCapacity:
        """Of the largest step that the engine's settings allow."""
        return StepCapacity.usual(
            tokens=self.options.max_num_batched_tokens,
            rows=self.options.max_num_seqs,
            blocks=-(-self.max_model_len // self.options.block_size),
        )

    @property
    def buckets(self) -> Buckets:
        """What graphs are captured for; none in the eager plan."""
        options = self.options
        if options.plan == "eager":
            return Buckets(())
        if options.capture_sizes is None:
            return Buckets.usual(options.max_num_seqs)
        return Buckets.of(options.capture_sizes, options.max_num_seqs)


def load_device_model(
    files: ModelFiles,
    options: BackendOptions,
    progress: Progress,
    collectives: Collectives,
    device: Device,
) -> DeviceModel:
    """Load a rank's part. Raises StartupError when the model or the options cannot be served, and
    DeviceMemoryError."""
    source = open_raw_weights(files)
    config = source.config
    max_model_len = config.context_within(options.max_model_len)
    dtype = _dtype(options, device)
    _refuse(config, options, dtype)
    shard = Shard(collectives.rank, collectives.size)
    form = network_form(config, shard)
    before = device.memory().allocated
    weights = _loader(source, device, shard, options, dtype).load(max_model_len, progress)
    model = DeviceModel(
        name=files.name,
        config=config,
        device=device,
        ops=operations(device, options),
        collectives=collectives,
        options=options,
        form=form,
        weights=weights,
        dtype=dtype,
        kv_cache_dtype=dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype,
        max_model_len=max_model_len,
        parameters=_parameters(source),
        weight_bytes=device.memory().allocated - before,
    )
    _log.info("weights are on the device", extra={"bytes": model.weight_bytes})
    return model


def operations(device: Device, options: BackendOptions) -> Ops:
    """The kernels for a device: Triton's on a GPU, plain torch on an emulated one."""
    if device.kind == "emulated":
        return ReferenceOps()
    # Only on a GPU: importing triton takes a second, and not every machine has it.
    from triptych.services.executor.device.triton_ops import TritonOps

    return TritonOps(device, deterministic=options.deterministic)


def _dtype(options: BackendOptions, device: Device) -> Dtype:
    if options.dtype == "auto":
        return "float32" if device.kind == "emulated" else "bfloat16"
    return options.dtype


def _refuse(config: ModelConfig, options: BackendOptions, dtype: Dtype) -> None:
    """Raise StartupError for what this plan does not compute."""
    if config.family != "llama" or config.rope is None:
        raise config.refused(
            f"{config.architecture} is not supported on device {options.device} (models of the "
            f"llama family are: llama, mistral, qwen2)"
        )
    if options.kv_cache_dtype not in ("auto", dtype, "int8", "fp8"):
        raise config.refused(
            f"kv_cache_dtype {options.kv_cache_dtype}: on device {options.device} the cache has "
            f"the model's dtype ({dtype}), int8 or fp8"
        )
    if options.block_size & (options.block_size - 1):
        raise config.refused(
            f"block_size {options.block_size}: on device {options.device} a power of two is needed"
        )
    if config.head_dim > _LARGEST_HEAD:
        raise config.refused(
            f"head_dim {config.head_dim} is above {_LARGEST_HEAD}, the most that device "
            f"{options.device} computes"
        )
    if options.quantization != "none" and config.quantization is not None:
        raise config.refused(
            f"quantization {options.quantization}: the weights are quantised already"
        )


def _loader(
    source: RawWeights, device: Device, shard: Shard, options: BackendOptions, dtype: Dtype
) -> WeightLoader:
    return WeightLoader(source, device, shard, DTYPES[dtype], options.quantization)


def _parameters(source: RawWeights) -> int:
    return sum(prod(shape) for _, shape in parameters_of(source.config))
