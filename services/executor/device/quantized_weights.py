"""Matrices of a checkpoint as a GPU multiplies by them: packed codes where there are such, else
floats of the model's dtype."""

import logging
from collections.abc import Callable, Sequence
from math import gcd

import numpy as np
import numpy.typing as npt
import torch

from triptych.kernels.reference.quantized_weights import (
    Bits,
    Float8Weight,
    IntWeight,
    QuantizedWeight,
    block_columns,
    packed,
    words_of_block,
)
from triptych.services.executor.device.shard import MatrixPart
from triptych.services.executor.device.stored_groups import (
    FLOATS,
    Codes,
    Float8Codes,
    IntCodes,
    kernel_group,
    rounded_codes,
)
from triptych.services.executor.raw_weights import RawTensor, RawWeights
from triptych.services.executor.rounding import check_rounding
from triptych.services.executor.stored_arrays import Floats

Dense = Callable[[Sequence[MatrixPart]], torch.Tensor]

_log = logging.getLogger(__name__)
_PACKED_ROWS = 4096  # at a time: packing makes int32 of codes


class DeviceMatrices:
    """Puts matrices of one checkpoint together, for one rank."""

    def __init__(self, source: RawWeights, rounding: str, dense: Dense) -> None:
        """`rounding`: what matrices of floats become (none, int8, int4, fp8). `dense` makes floats
        of parts. Raises StartupError when such a model cannot be rounded."""
        if rounding in ("int8", "int4"):
            check_rounding(source.config, "int8" if rounding == "int8" else "int4")
        self._source = source
        self._rounding = rounding
        self._dense = dense
        self._told = False

    def __call__(self, parts: Sequence[MatrixPart]) -> torch.Tensor | QuantizedWeight:
        """The parts one below the other, on the host: codes if all of them have the same kind."""
        found = []
        for part in parts:
            tensor = self._source.tensor(part.parameter, part.shape)
            codes = rounded_codes(tensor, part, self._rounding)
            if codes is None:
                break
            found.append(codes)
        ints = [each for each in found if isinstance(each, IntCodes)]
        floats = [each for each in found if isinstance(each, Float8Codes)]
        if len(ints) == len(parts) and len({each.bits for each in ints}) == 1:
            return _int_weight(ints)
        if len(floats) == len(parts) and len({each.group for each in floats}) == 1:
            return _float8_weight(floats)
        if not self._told and any(map(self._is_quantized, parts)):
            self._told = True
            _log.info("%s and others are dequantised: kernels lack their form", parts[0].parameter)
        return self._dense(parts)

    def _is_quantized(self, part: MatrixPart) -> bool:
        tensor = self._source.tensor(part.parameter, part.shape)
        return not (isinstance(tensor, RawTensor) and tensor.type in FLOATS)


def _int_weight(parts: Sequence[IntCodes]) -> IntWeight:
    bits, columns = parts[0].bits, parts[0].codes.shape[1]
    if all(each.group == columns for each in parts):
        group = columns
    else:
        group = kernel_group(bits, gcd(*(each.group for each in parts))) or 0
        parts = [each.of_group(group) for each in parts]
    whole = group == columns
    symmetric = all(each.symmetric for each in parts)
    padding = 0 if whole else -(-columns // block_columns(bits, group)) * block_columns(bits, group)
    groups = max(padding // group, parts[0].scales.shape[1])
    group = 0 if whole else group
    zeros = None
    if not symmetric:
        zeros = _columns_first([each.zeros for each in parts], groups)
    return IntWeight(
        bits=bits,
        columns=columns,
        group=group,
        words=_words([each.codes for each in parts], bits, group),
        scales=_narrowest(_columns_first([each.scales for each in parts], groups)),
        zeros=None if zeros is None else zeros.to(torch.int8 if bits == 4 else torch.int16),
    )


def _float8_weight(parts: Sequence[Float8Codes]) -> Float8Weight:
    group = parts[0].group
    return Float8Weight(
        columns=parts[0].codes.shape[1],
        group=group,
        words=_words([each.codes for each in parts], 8, group),
        scales=_columns_first([each.scales for each in parts], parts[0].scales.shape[1]),
    )


def _words(parts: Sequence[Codes], bits: Bits, group: int) -> torch.Tensor:
    words = []
    for codes in parts:
        for start in range(0, len(codes), _PACKED_ROWS):
            some = torch.from_numpy(np.ascontiguousarray(codes[start : start + _PACKED_ROWS]))
            words.append(packed(some, bits, words_of_block(group)))
    return torch.cat(words)


def _columns_first(
    parts: Sequence[Floats] | Sequence[npt.NDArray[np.int32]], groups: int
) -> torch.Tensor:
    """[rows, g] of each part -> [groups, all rows], zeros behind the last group."""
    rows = torch.cat([torch.from_numpy(np.ascontiguousarray(each)) for each in parts])
    out = rows.new_zeros((groups, len(rows)))
    out[: rows.shape[1]] = rows.T
    return out


def _narrowest(scales: torch.Tensor) -> torch.Tensor:
    """float32 as the first of float16 and bfloat16 that holds all of them exactly, if any does."""
    for dtype in (torch.float16, torch.bfloat16):
        narrow = scales.to(dtype)
        if torch.equal(narrow.to(torch.float32), scales):
            return narrow
    return scales
