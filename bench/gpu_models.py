"""Models of real shapes with random weights, put onto a device without a file."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from triptych.kernels.reference.quantized_weights import Float8Weight, packed, words_of_block
from triptych.services.executor.backend import BackendOptions
from triptych.services.executor.collectives import ALONE
from triptych.services.executor.device.device import Device
from triptych.services.executor.device.linear import DenseLinear, Linear, QuantizedLinear, linear
from triptych.services.executor.device.loading import DTYPES, DeviceModel, operations
from triptych.services.executor.device.network import LayerWeights, NetworkWeights
from triptych.services.executor.device.shard import Shard
from triptych.services.executor.device.weights import network_form, rotary_table
from triptych.services.executor.model_config import ModelConfig, Rope

sys.path[:0] = [str(Path(__file__).parent)]

Weights = Literal["dense", "fp8"]
_LARGEST_E4M3 = 448.0


@dataclass(frozen=True)
class Shape:
    """A model to measure: its sizes are those of the model that it is named after."""

    name: str
    config: ModelConfig
    weights: Weights = "dense"

    @property
    def matrix_parameters(self) -> int:
        """Of all matrices that each token is multiplied by; the head is not, but for the last."""
        c = self.config
        attention = c.hidden_size * (2 * c.query_size + 2 * c.kv_size)
        return c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)


def _llama(name: str, *sizes: int, tied: bool = False) -> ModelConfig:
    """`sizes`: vocabulary, hidden, inner, layers, heads, key-value heads, head_dim."""
    vocabulary, hidden, inner, layers, heads, kv_heads, head_dim = sizes
    return ModelConfig(
        source=name, architecture="LlamaForCausalLM", family="llama", vocabulary_size=vocabulary,
        hidden_size=hidden, intermediate_size=inner, num_layers=layers, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, max_position=16384, norm_epsilon=1e-5,
        activation="silu", tied_head=tied, rope=Rope(500000.0),
    )  # fmt: skip


_LLAMA_8B = _llama("Llama-3.1-8B", 128256, 4096, 14336, 32, 32, 8, 128)
SHAPES = (
    Shape("Qwen3-8B", _llama("Qwen3-8B", 151936, 4096, 12288, 36, 32, 8, 128)),
    Shape("Llama-3.1-8B fp8", _LLAMA_8B, "fp8"),
    Shape("Llama-3.2-1B", _llama("Llama-3.2-1B", 128256, 2048, 8192, 16, 32, 8, 64, tied=True)),
)
"""What matters most comes first. Qwen3's own norms of queries and keys are left out: they are no
matrices."""
TINY = (
    Shape("tiny", _llama("tiny", 97, 32, 48, 2, 4, 2, 8)),
    Shape("tiny fp8", _llama("tiny", 97, 32, 48, 2, 4, 2, 8), "fp8"),
)


def random_model(shape: Shape, device: Device, options: BackendOptions) -> DeviceModel:
    """The shape's model on a device. Raises DeviceMemoryError where it does not fit."""
    config = shape.config
    dtype = "float32" if device.kind == "emulated" else "bfloat16"
    with torch.no_grad():
        weights = _weights(shape, device, DTYPES[dtype])
    device.synchronize()
    model = DeviceModel(
        name=shape.name,
        config=config,
        device=device,
        ops=operations(device, options),
        collectives=ALONE,
        options=options,
        form=network_form(config, Shard()),
        weights=weights,
        dtype=dtype,
        kv_cache_dtype=dtype,
        max_model_len=config.max_position,
        parameters=shape.matrix_parameters + 2 * config.vocabulary_size * config.hidden_size,
        weight_bytes=0,
    )
    return replace(model, weight_bytes=bytes_of_a_step(model))


def bytes_of_a_step(model: DeviceModel) -> int:
    """Of the matrices that a decode step reads: all but the embedding, of which it takes rows."""
    matrices = [model.weights.head]
    for layer in model.weights.layers:
        matrices += [layer.qkv, layer.output, layer.gate_up, layer.down]
    return sum(_num_bytes(matrix) for matrix in matrices)


def _num_bytes(matrix: Linear) -> int:
    if isinstance(matrix, DenseLinear):
        return matrix.weight.numel() * matrix.weight.element_size()
    assert isinstance(matrix, QuantizedLinear)
    return matrix.weight.num_bytes


def with_options(model: DeviceModel, options: BackendOptions) -> DeviceModel:
    """The same weights, run otherwise."""
    return replace(model, options=options, ops=operations(model.device, options))


def _weights(shape: Shape, device: Device, dtype: torch.dtype) -> NetworkWeights:
    config, where = shape.config, device.torch_device
    generator = torch.Generator(where).manual_seed(1)

    def dense(rows: int, columns: int) -> torch.Tensor:
        values = torch.empty((rows, columns), dtype=dtype, device=where)
        return values.normal_(0.0, columns**-0.5, generator=generator)

    def matrix(rows: int, columns: int) -> Linear:
        values = dense(rows, columns)
        return linear(values if shape.weights == "dense" else _float8(values))

    ones = torch.ones(config.hidden_size, dtype=torch.float32, device=where)
    embedding = dense(config.vocabulary_size, config.hidden_size)
    layers = tuple(_layer(config, ones, matrix) for _ in range(config.num_layers))
    head = linear(embedding)
    if not config.tied_head:
        head = matrix(config.vocabulary_size, config.hidden_size)
    return NetworkWeights(
        embedding=embedding,
        first_id=0,
        layers=layers,
        norm=ones,
        head=head,
        cos_sin=rotary_table(config, config.max_position).to(where),
    )


def _layer(
    config: ModelConfig, ones: torch.Tensor, matrix: Callable[[int, int], Linear]
) -> LayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    return LayerWeights(
        attention_norm=ones,
        qkv=matrix(config.query_size + 2 * config.kv_size, hidden),
        output=matrix(hidden, config.query_size),
        mlp_norm=ones,
        gate_up=matrix(2 * inner, hidden),
        down=matrix(hidden, inner),
    )


def _float8(values: torch.Tensor) -> Float8Weight:
    """Rounded to e4m3 with a scale an output, a part of the rows at a time."""
    scales, words = [], []
    for rows in values.split(4096):
        wide = rows.to(torch.float32)
        scale = wide.abs().amax(dim=1) / _LARGEST_E4M3
        codes = (wide / scale.unsqueeze(1)).to(torch.float8_e4m3fn).view(torch.uint8)
        scales.append(scale)
        words.append(packed(codes.to(torch.int32), 8, words_of_block(0)))
    return Float8Weight(values.shape[1], 0, torch.cat(words), torch.cat(scales).unsqueeze(0))
