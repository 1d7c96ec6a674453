"""Float weights rounded to integer groups while they load: --quantization int8 or int4.

Groups of 32 columns. int8: symmetric, scale = largest magnitude / 127. int4: scale and zero point
from the group's extremes; embedding and head stay at 8 bits, where 4 cost most. Plain rounding to
the nearest code: quantisers that look at activations (GPTQ, AWQ) lose less at 4 bits.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from triptych.kernels.cpu import pack_groups_into
from triptych.services.executor.model_config import ModelConfig
from triptych.services.executor.raw_weights import Bytes, Floats, RawTensor, RawWeights
from triptych.services.runtime.lifecycle import StartupError

Rounding = Literal["int8", "int4"]
Bits = Literal[4, 8]

GROUP = 32
_TYPES: dict[Bits, int] = {4: 256 + (1 << 16), 8: 257 + (1 << 16)}  # as the kernels number them
EDGES = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class RoundedGroups:
    """Weight = scale * (code - zero): int32 [rows, columns]; float16, int32 [rows, groups]."""

    codes: npt.NDArray[np.int32]
    scales: npt.NDArray[np.float16]
    zeros: npt.NDArray[np.int32]

    def values(self) -> Floats:
        """float32 [rows, columns], exact."""
        rows, groups = self.zeros.shape
        difference = self.codes.reshape(rows, groups, -1) - self.zeros[..., None]
        values = self.scales.astype(np.float32)[..., None] * difference.astype(np.float32)
        return values.reshape(self.codes.shape)


def round_rows(name: str, weights: Floats, bits: Bits) -> RoundedGroups:
    """Round float32 [rows, columns]. Raises StartupError for what has no scale in float16."""
    rows, columns = weights.shape
    groups = weights.reshape(rows, columns // GROUP, GROUP)
    low, high = groups.min(-1), groups.max(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        if bits == 8:
            exact = np.maximum(np.abs(low), np.abs(high)) / np.float32(127)
        else:
            low, high = np.minimum(low, 0), np.maximum(high, 0)
            exact = (high - low) / np.float32(15)
        scales = exact.astype(np.float16)
        # Up, so that the extremes keep their codes: float16 is coarse where it is tiny.
        scales = np.where(scales < exact, np.nextafter(scales, np.float16(np.inf)), scales)
    if not np.isfinite(scales).all():
        raise StartupError(f"{name}: weights that are not finite, or too large for float16 scales")
    used = scales.astype(np.float32)
    inverse = np.divide(np.float32(1), used, out=np.zeros_like(used), where=used > 0)
    if bits == 8:
        zeros = np.zeros((rows, columns // GROUP), np.int32)
        bounds = (-127, 127)
    else:
        zeros = np.rint(-low * inverse).clip(0, 15).astype(np.int32)
        bounds = (0, 15)
    codes = np.rint(groups * inverse[..., None]) + zeros[..., None]
    return RoundedGroups(codes.clip(*bounds).astype(np.int32).reshape(rows, columns), scales, zeros)


def bits_of(parameter: str, rounding: Rounding) -> Bits:
    """How many bits a matrix is rounded to."""
    return 8 if rounding == "int8" or parameter in EDGES else 4


def check_rounding(config: ModelConfig, rounding: Rounding) -> None:
    """Raise StartupError unless the weights of such a model can be rounded."""
    if config.family != "llama":
        raise config.refused(f"quantization {rounding} is not supported for {config.architecture}")
    if config.quantization is not None:
        raise config.refused(f"quantization {rounding}: the weights are quantised already")
    for columns in (config.hidden_size, config.query_size, config.intermediate_size):
        if columns % GROUP:
            raise config.refused(
                f"quantization {rounding}: {columns} columns are no multiple of {GROUP}"
            )


@dataclass(frozen=True, slots=True)
class RoundedTensor:
    """A float matrix of a checkpoint, rounded as it is packed."""

    tensor: RawTensor
    bits: Bits

    @property
    def name(self) -> str:
        """As `StoredTensor.name`."""
        return self.tensor.name

    @property
    def rows(self) -> int:
        """As `StoredTensor.rows`."""
        return self.tensor.rows

    @property
    def num_bytes(self) -> int:
        """As `StoredTensor.num_bytes`."""
        return self.tensor.num_bytes

    @property
    def packed_type(self) -> int:
        """As `StoredTensor.packed_type`."""
        return _TYPES[self.bits]

    @property
    def column_order(self) -> None:
        """As `StoredTensor.column_order`: columns stay where they are."""
        return None

    def obstacle(self) -> str | None:
        """As `StoredTensor.obstacle`: none."""
        return None

    def floats(self) -> Floats:
        """As `StoredTensor.floats`: this is no vector."""
        raise ValueError(f"{self.name}: a matrix is no vector")

    def with_rows(self, order: npt.NDArray[np.int64]) -> "RoundedTensor":
        """As `StoredTensor.with_rows`."""
        return replace(self, tensor=self.tensor.with_rows(order))

    def pack(self, start: int, stop: int, to: Bytes) -> None:
        """As `StoredTensor.pack`."""
        rounded = round_rows(self.name, self.tensor.rows_as_floats(start, stop), self.bits)
        pack_groups_into(
            self.packed_type,
            rounded.codes.astype(np.int8).view(np.uint8),
            rounded.scales.view(np.uint16),
            rounded.zeros.astype(np.float16).view(np.uint16),
            to,
        )

    def release(self, stop_row: int) -> None:
        """As `StoredTensor.release`."""
        self.tensor.release(stop_row)


class RoundedWeights:
    """A checkpoint whose matrices are rounded, as RawWeights. Raises StartupError."""

    def __init__(self, source: RawWeights, rounding: Rounding) -> None:
        check_rounding(source.config, rounding)
        self._source = source
        self._rounding: Rounding = rounding

    @property
    def config(self) -> ModelConfig:
        """As `RawWeights.config`."""
        return self._source.config

    def rope_factors(self) -> Floats | None:
        """As `RawWeights.rope_factors`."""
        return self._source.rope_factors()

    def account(self, parameters: Collection[str]) -> None:
        """As `RawWeights.account`."""
        self._source.account(parameters)

    def tensor(self, parameter: str, shape: tuple[int, ...]) -> RoundedTensor | RawTensor:
        """As `RawWeights.tensor`."""
        tensor = self._source.tensor(parameter, shape)
        assert isinstance(tensor, RawTensor)
        if len(shape) == 1:
            return tensor
        return RoundedTensor(tensor, bits_of(parameter, self._rounding))
