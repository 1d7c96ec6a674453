"""Weights of a Llama from any checkpoint onto a device, a rank's part of each matrix at a time.

Host memory stays bounded: a fused matrix is put together on the host, copied, and let go of.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeGuard

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from triptych.kernels.reference.quantized_weights import IntWeight, QuantizedWeight
from triptych.services.executor.device.device import Device
from triptych.services.executor.device.linear import Linear, linear
from triptych.services.executor.device.network import LayerWeights, NetworkForm, NetworkWeights
from triptych.services.executor.device.quantized_weights import DeviceMatrices
from triptych.services.executor.device.shard import MatrixPart, Shard
from triptych.services.executor.float8_tensor import Float8Tensor
from triptych.services.executor.group_tensor import GroupTensor
from triptych.services.executor.model_config import ModelConfig
from triptych.services.executor.raw_weights import Floats, RawTensor, RawWeights, StoredTensor
from triptych.services.executor.rope_frequencies import inverse_frequencies
from triptych.services.executor.rounding import round_rows
from triptych.services.executor.weights import Progress
from triptych.services.runtime.gguf_file import TensorType

Rounding = Literal["none", "int8", "int4", "fp8"]
MatrixLoader = Callable[[Sequence[MatrixPart]], torch.Tensor | QuantizedWeight]
"""Puts the parts of a matrix together on the host."""

_CHUNK_ELEMENTS = 1 << 22
_FLOATS = (TensorType.F32, TensorType.F16, TensorType.BF16)
_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def network_form(config: ModelConfig, shard: Shard) -> NetworkForm:
    """The sizes of a rank. Raises StartupError where the model cannot be cut like that."""
    shard.check(config)
    first, last = shard.kv_span(config.num_kv_heads)
    return NetworkForm(
        num_heads=config.num_heads // shard.size,
        num_kv_heads=last - first,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size // shard.size,
    )


class WeightLoader:
    """Loads one checkpoint for one rank."""

    def __init__(
        self,
        source: RawWeights,
        device: Device,
        shard: Shard,
        dtype: torch.dtype,
        rounding: Rounding = "none",
    ) -> None:
        """`rounding`: what matrices of floats are rounded to as they load. Raises StartupError when
        such a model cannot be rounded."""
        self._source = source
        self._config = source.config
        self._device = device
        self._shard = shard
        self._dtype = dtype
        self._rounding = rounding
        self._matrix: MatrixLoader = DeviceMatrices(source, rounding, self._dense)
        self._total = 0
        self._done = 0

    def load(self, max_model_len: int, progress: Progress) -> NetworkWeights:
        """All of the rank. Raises StartupError, naming tensors, and DeviceMemoryError."""
        config = self._config
        names = dict(parameters_of(config))
        self._source.account(names)
        self._total = sum(self._source.tensor(*each).num_bytes for each in names.items())
        embedding, padded = self._embedding(_EMBEDDING)
        self._advance(progress, [_EMBEDDING])
        layers = []
        for index in range(config.num_layers):
            prefix = f"model.layers.{index}."
            layers.append(self._layer(prefix))
            self._advance(progress, [name for name in names if name.startswith(prefix)])
        head = linear(padded) if config.tied_head else self._head(padded.shape[0])
        norm = self._upload(self._vector(_NORM))
        self._advance(progress, [_NORM, *([] if config.tied_head else [_HEAD])])
        start, _, _ = self._shard.vocabulary(config.vocabulary_size)
        return NetworkWeights(
            embedding=embedding,
            first_id=start,
            layers=tuple(layers),
            norm=norm,
            head=head,
            cos_sin=self._upload(rotary_table(config, max_model_len, self._source.rope_factors())),
        )

    def _advance(self, progress: Progress, names: Sequence[str]) -> None:
        shapes = dict(parameters_of(self._config))
        for name in names:
            tensor = self._source.tensor(name, shapes[name])
            self._done += tensor.num_bytes
            if len(shapes[name]) == 2:
                tensor.release(tensor.rows)
        progress(self._done, self._total)

    def _embedding(self, parameter: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The rank's rows, and the same with rows of padding, in the model's dtype."""
        config = self._config
        shape = (config.vocabulary_size, config.hidden_size)
        start, stop, padded = self._shard.vocabulary(config.vocabulary_size)
        table = self._device.zeros((padded, config.hidden_size), self._dtype)
        part = MatrixPart(parameter, shape, start, stop, 0, shape[1])
        for at, values in self._rows(part):
            self._device.upload(values, table[at : at + len(values)])
            self._device.synchronize()  # the host's copy may go
        return table[: stop - start], table

    def _head(self, padded: int) -> Linear:
        config = self._config
        shape = (config.vocabulary_size, config.hidden_size)
        start, stop, _ = self._shard.vocabulary(config.vocabulary_size)
        if stop - start < padded:  # the last ranks' rows are padded: only dense ones can be
            return linear(self._embedding(_HEAD)[1])
        part = MatrixPart(_HEAD, shape, start, stop, 0, shape[1])
        return linear(self._moved(self._matrix([part])))

    def _layer(self, prefix: str) -> LayerWeights:
        config, shard = self._config, self._shard
        hidden, inner = config.hidden_size, config.intermediate_size
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        q = shard.outputs(f"{attention}q_proj.weight", (config.query_size, hidden))
        k, v = (
            shard.kv_outputs(
                f"{attention}{name}.weight",
                (config.kv_size, hidden),
                config.num_kv_heads,
                config.head_dim,
            )
            for name in ("k_proj", "v_proj")
        )
        gate, up = (
            shard.outputs(f"{mlp}{name}.weight", (inner, hidden))
            for name in ("gate_proj", "up_proj")
        )
        output = shard.inputs(f"{attention}o_proj.weight", (hidden, config.query_size))
        down = shard.inputs(f"{mlp}down_proj.weight", (hidden, inner))
        return LayerWeights(
            attention_norm=self._upload(self._vector(f"{prefix}input_layernorm.weight")),
            qkv=self._linear([q, k, v], bias=config.qkv_bias),
            output=self._linear([output], bias=config.output_bias and shard.rank == 0),
            mlp_norm=self._upload(self._vector(f"{prefix}post_attention_layernorm.weight")),
            gate_up=self._linear([gate, up], bias=config.mlp_bias),
            # A bias of what is summed over ranks is added once.
            down=self._linear([down], bias=config.mlp_bias and shard.rank == 0),
        )

    def _linear(self, parts: Sequence[MatrixPart], *, bias: bool) -> Linear:
        weight = self._moved(self._matrix(parts))
        if not bias:
            return linear(weight)
        values = [
            self._vector(part.parameter.removesuffix("weight") + "bias")[
                part.row_start : part.row_stop
            ]
            for part in parts
        ]
        return linear(weight, self._upload(torch.cat(values).to(self._dtype)))

    def _dense(self, parts: Sequence[MatrixPart]) -> torch.Tensor:
        out = torch.empty((sum(part.rows for part in parts), parts[0].columns), dtype=self._dtype)
        above = 0
        for part in parts:
            for at, values in self._rows(part):
                out[above + at : above + at + len(values)] = values
            above += part.rows
        return out

    def _rows(self, part: MatrixPart) -> Iterator[tuple[int, torch.Tensor]]:
        """Some rows of a part at a time, in the model's dtype, and which is the first of them."""
        tensor = self._source.tensor(part.parameter, part.shape)
        assert isinstance(tensor, RawTensor | GroupTensor | Float8Tensor)
        step = max(1, _CHUNK_ELEMENTS // part.shape[1])
        for start in range(part.row_start, part.row_stop, step):
            stop = min(start + step, part.row_stop)
            columns = slice(part.column_start, part.column_stop)
            if self._as_stored(tensor):
                bits = tensor.bytes_of(start, stop).view(np.int16).reshape(stop - start, -1)
                some = torch.from_numpy(bits[:, columns].copy()).view(torch.bfloat16)
            else:
                values = self._values(tensor, start, stop)[:, columns]
                some = torch.from_numpy(np.ascontiguousarray(values)).to(self._dtype)
            yield start - part.row_start, some

    def _as_stored(self, tensor: StoredTensor) -> TypeGuard[RawTensor]:
        """Whether its bytes are what is wanted: most checkpoints' are, and reading them is then
        bound by the disk."""
        return (
            isinstance(tensor, RawTensor)
            and tensor.type == TensorType.BF16
            and self._dtype == torch.bfloat16
            and self._rounding not in ("int8", "int4")
        )

    def _values(
        self, tensor: RawTensor | GroupTensor | Float8Tensor, start: int, stop: int
    ) -> Floats:
        """Of rows [start, stop): embedding and head are rounded as on the CPU, also as floats."""
        values = rows_as_floats(tensor, start, stop)
        floats = isinstance(tensor, RawTensor) and tensor.type in _FLOATS
        if floats and self._rounding in ("int8", "int4"):
            return round_rows(tensor.name, values, 8).values()
        return values

    def _vector(self, parameter: str) -> torch.Tensor:
        shape = dict(parameters_of(self._config))[parameter]
        tensor = self._source.tensor(parameter, shape)
        return torch.from_numpy(tensor.floats())

    def _moved(self, weight: torch.Tensor | QuantizedWeight) -> torch.Tensor | QuantizedWeight:
        """The same on the device."""
        if isinstance(weight, torch.Tensor):
            return self._upload(weight)
        moved = replace(
            weight, words=self._upload(weight.words), scales=self._upload(weight.scales)
        )
        if isinstance(moved, IntWeight) and moved.zeros is not None:
            return replace(moved, zeros=self._upload(moved.zeros))
        return moved

    def _upload(self, host: torch.Tensor) -> torch.Tensor:
        target = self._device.empty(host.shape, host.dtype)
        self._device.upload(host.contiguous(), target)
        self._device.synchronize()  # the host's copy may go
        return target


def rotary_table(
    config: ModelConfig, max_model_len: int, factors: Floats | None = None
) -> torch.Tensor:
    """cos | sin of every position, float32 [max_model_len, head_dim]: each the float32 nearest to
    that of the float32 angle, so that it depends on nothing else. `factors`: a GGUF's divisors."""
    assert config.rope is not None
    frequencies = inverse_frequencies(config.rope, config.head_dim, factors)
    angles = np.outer(np.arange(max_model_len, dtype=np.float32), frequencies)
    wide = angles.astype(np.float64)
    table = np.concatenate((np.cos(wide), np.sin(wide)), axis=1)
    return torch.from_numpy(table.astype(np.float32))


def rows_as_floats(tensor: RawTensor | GroupTensor | Float8Tensor, start: int, stop: int) -> Floats:
    """Rows [start, stop) of a stored matrix, dequantised, float32 [stop - start, columns]."""
    if isinstance(tensor, GroupTensor | Float8Tensor):
        return tensor.values(start, stop)
    if tensor.type in _FLOATS:
        return tensor.rows_as_floats(start, stop)
    raw = tensor.bytes_of(start, stop).reshape(stop - start, -1)
    # Overflow in a broken file's scales gives infinities, which the sampler reports.
    with np.errstate(over="ignore", invalid="ignore"):
        values: Floats = dequantize(raw, GGMLQuantizationType(int(tensor.type)))
    return values


def parameters_of(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names in transformers' state dict, and shapes, of all that a Llama has."""
    hidden, inner = config.hidden_size, config.intermediate_size
    matrices = (
        ("self_attn.q_proj", (config.query_size, hidden), config.qkv_bias),
        ("self_attn.k_proj", (config.kv_size, hidden), config.qkv_bias),
        ("self_attn.v_proj", (config.kv_size, hidden), config.qkv_bias),
        ("self_attn.o_proj", (hidden, config.query_size), config.output_bias),
        ("mlp.gate_proj", (inner, hidden), config.mlp_bias),
        ("mlp.up_proj", (inner, hidden), config.mlp_bias),
        ("mlp.down_proj", (hidden, inner), config.mlp_bias),
    )
    yield _EMBEDDING, (config.vocabulary_size, hidden)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        for name, shape, bias in matrices:
            yield f"{prefix}{name}.weight", shape
            if bias:
                yield f"{prefix}{name}.bias", shape[:1]
    yield _NORM, (hidden,)
    if not config.tied_head:
        yield _HEAD, (config.vocabulary_size, hidden)
