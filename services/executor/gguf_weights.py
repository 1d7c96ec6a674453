"""Weights from a GGUF file: mapped, dequantised a few rows at a time into the parameters.

The arithmetic of the quantised types is the `gguf` package's. Names follow llama.cpp's converter,
which also reorders the rows of q and k of `llama` files (rotation of neighbours instead of halves)
and transposes GPT-2's matrices: both are undone here.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from triptych.services.executor.gguf_config import ROPE_FACTORS, read_gguf_config
from triptych.services.executor.gguf_names import gguf_place
from triptych.services.executor.model_config import ModelConfig
from triptych.services.executor.weights import Progress, account, check_shape
from triptych.services.runtime.gguf_file import GgufTensor, TensorType, open_gguf

_CHUNK_ELEMENTS = 1 << 20  # 4 MiB of float32: keeps the dequantiser's temporaries in cache


class GgufWeights:
    """One GGUF file as a WeightSource. Raises StartupError on a broken or unsupported file."""

    def __init__(self, path: Path) -> None:
        self._file = open_gguf(path)
        self._config = read_gguf_config(self._file)

    @property
    def config(self) -> ModelConfig:
        """As `WeightSource.config`."""
        return self._config

    def rope_factors(self) -> torch.Tensor | None:
        """The tensor `rope_freqs.weight`, if there is one."""
        tensor = self._file.tensors.get(ROPE_FACTORS)
        if tensor is None or self._config.rope is None:
            return None
        check_shape(self._source, ROPE_FACTORS, tensor.shape, (self._config.head_dim // 2,))
        out = torch.empty(tensor.shape, dtype=torch.float32)
        self._copy(tensor, out)
        if not bool(((out > 0) & torch.isfinite(out)).all()):
            raise self._file.broken(f"{ROPE_FACTORS} holds a value that is not positive")
        return out

    def load(self, parameters: Mapping[str, torch.Tensor], progress: Progress) -> None:
        """As `WeightSource.load`."""
        tensors = self._file.tensors
        places = {name: gguf_place(name, self._config) for name in parameters}
        found = set(tensors)
        if self._config.rope is not None:
            found.discard(ROPE_FACTORS)
        account(self._source, {place.name for place in places.values()}, found)
        total = sum(tensors[place.name].num_bytes for place in places.values())
        done = 0
        for name, out in parameters.items():
            place = places[name]
            tensor = tensors[place.name]
            target = out.T if place.change == "transposed" else out
            check_shape(self._source, place.name, tensor.shape, tuple(target.shape))
            order = (
                _halves_from_neighbours(place.heads, tensor.shape[0])
                if place.change == "interleaved"
                else None
            )
            self._copy(tensor, target, order)
            done += tensor.num_bytes
            progress(done, total)

    @property
    def _source(self) -> str:
        return str(self._file.path)

    def _copy(
        self, tensor: GgufTensor, out: torch.Tensor, order: torch.Tensor | None = None
    ) -> None:
        """Dequantise into `out` (same shape); row r of the file goes to row order[r]."""
        rows = tensor.shape[0]
        columns = out.numel() // rows
        # A block of a quantised type never spans rows; a vector of them is one row.
        if len(tensor.shape) == 1:
            rows, columns = (1, columns * rows) if order is None else (rows, columns)
        raw = np.frombuffer(self._file.data, np.uint8, tensor.num_bytes, tensor.offset)
        raw = raw.reshape(rows, tensor.num_bytes // rows)
        target = out.unsqueeze(0) if out.dim() == 1 and rows == 1 else out
        step = max(1, _CHUNK_ELEMENTS // columns)
        for start in range(0, rows, step):
            values = torch.from_numpy(_floats(raw[start : start + step], tensor.type))
            if target.dim() == 1:
                values = values.squeeze(1)
            if order is None:
                target[start : start + step].copy_(values)
            else:
                target.index_copy_(0, order[start : start + step], values.to(target.dtype))


def _floats(raw: npt.NDArray[np.uint8], kind: TensorType) -> npt.NDArray[np.float32]:
    """Rows of blocks, uint8 [n, row bytes] -> values, float32 [n, columns], writable."""
    if kind == TensorType.F32:
        return raw.view(np.float32).copy()
    # Overflow in a broken file's scales gives infinities, which the sampler reports.
    with np.errstate(over="ignore", invalid="ignore"):
        values: npt.NDArray[np.float32] = dequantize(raw, GGMLQuantizationType(int(kind)))
    return values


def _halves_from_neighbours(heads: int, rows: int) -> torch.Tensor:
    """Where row r of an interleaved q or k belongs: pair (2i, 2i + 1) of a head -> i, half + i."""
    index = torch.arange(rows).view(heads, 2, rows // heads // 2)
    return index.transpose(1, 2).reshape(rows)
