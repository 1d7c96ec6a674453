"""What attention is compiled for ahead of time."""

from collections.abc import Iterator

import torch

from triptych.kernels.triton.attention_forms import (
    PARTITION,
    Codes,
    DeviceKind,
    Tiles,
    attention_tiles,
    few_queries,
    wide_of,
)
from triptych.kernels.triton.attention_prefill import prefill_kernel
from triptych.kernels.triton.attention_split import merge_kernel, split_kernel
from triptych.kernels.triton.variants import Kernel, Variant

_KINDS = {
    80: DeviceKind(108, hopper=False, roomy=True, e4m3=False),
    90: DeviceKind(132, hopper=True, roomy=True, e4m3=True),
}
_FLOATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_CODES = {"int8": "*i8", "fp8": "*u8", "fp8_bits": "*u8"}
_STRIDES = (
    "q_token_stride", "q_head_stride", "out_token_stride", "out_head_stride", "block_stride",
    "slot_stride", "head_stride",
)  # fmt: skip
_TYPES = {
    "block_tables": "*i32", "row_starts": "*i32", "kv_lengths": "*i32",
    "sums_out": "*fp32", "stats_out": "*fp32", "sums_in": "*fp32", "stats_in": "*fp32",
    "factor": "fp32", "cap_factor": "fp32",
    **dict.fromkeys(_STRIDES, "i32"),
    **dict.fromkeys(("table_stride", "scale_block_stride", "scale_slot_stride"), "i32"),
    **dict.fromkeys(("num_rows", "capacity", "window", "num_kv_heads", "num_heads"), "i32"),
}  # fmt: skip
_SPILLS = 120
"""Bytes that prefill may spill: what it needs before and after its loop, not within."""


def attention_variants() -> Iterator[Variant]:
    """Each kernel, by what changes its code most: head size, types, window and cap."""
    for device, kind in _KINDS.items():
        for head_dim in (64, 80, 128, 256):
            yield from _kernels(device, head_dim, torch.bfloat16)
        for head_dim in (64, 128, 256):
            yield from _kernels(device, head_dim, torch.float32)
        yield from _kernels(device, 128, torch.float16)
        yield from _kernels(device, 128, torch.bfloat16, windowed=True)
        yield from _kernels(device, 256, torch.bfloat16, windowed=True, capped=True)
        yield from _kernels(device, 128, torch.bfloat16, group=1)
        yield from _kernels(device, 128, torch.bfloat16, codes="int8")
        fp8: Codes = "fp8" if kind.e4m3 else "fp8_bits"
        yield from _kernels(device, 128, torch.bfloat16, codes=fp8)
        yield from _kernels(device, 256, torch.bfloat16, codes=fp8)


def _kernels(
    device: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    codes: Codes | None = None,
    group: int = 4,
    windowed: bool = False,
    capped: bool = False,
) -> Iterator[Variant]:
    """The kernels of a form. Their names begin with what they are, and end with the form's."""
    tiles = attention_tiles(wide_of(head_dim), dtype, codes, _KINDS[device])
    pointer = "*" + _FLOATS[dtype]
    cache = pointer if codes is None else _CODES[codes]
    types = {"q": pointer, "out": pointer, "k_cache": cache, "v_cache": cache, **_TYPES}
    constants: dict[str, object] = {
        "GROUP": group, "HEAD_DIM": head_dim, "WIDE": wide_of(head_dim), "PARTITION": PARTITION,
        "BLOCK_SIZE": 16, "CODES": codes, "WINDOWED": windowed, "CAPPED": capped,
        "FLOAT32": dtype == torch.float32,
    }  # fmt: skip
    scales = ("k_scales", "v_scales")
    if codes is None:
        constants |= dict.fromkeys(scales)
    else:
        types |= dict.fromkeys(scales, "*fp32")
    marks = [f"{pointer[1:]}-{head_dim}", codes, f"group{group}"]
    marks += ["window"] * windowed + ["cap"] * capped + [f"sm{device}"]
    name = "-".join(mark for mark in marks if mark)

    def variant(
        part: str, kernel: Kernel, tile: Tiles, spills: int = 0, **own_constants: int | None
    ) -> Variant:
        given = {**constants, "ROWS": tile.rows, "KEYS": tile.keys, **own_constants}
        own = kernel.arg_names
        return Variant(
            f"{part}-{name}", kernel,
            {key: types[key] for key in own if key not in given},
            {key: given[key] for key in own if key in given},
            aligned=frozenset(_STRIDES) & {*own}, devices=(device,), max_spills=spills,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip

    decode = {"FEW": 1, "ROW_SLOTS": 128, "row_starts": None}
    mixed = {"FEW": few_queries(tiles.decode.rows, group), "ROW_SLOTS": 128}
    merge = Tiles(1, 1, 1, 3)
    yield variant("split", split_kernel, tiles.decode, 16, **decode)
    yield variant("merge", merge_kernel, merge, 0, **decode)
    yield variant("prefill", prefill_kernel, tiles.prefill, _SPILLS, FEW=0, ROW_SLOTS=16)
    if codes is None and dtype == torch.bfloat16:  # of the others there would be little new to see
        yield variant("mixed-split", split_kernel, tiles.decode, 16, **mixed)
        yield variant("mixed-merge", merge_kernel, merge, **mixed)
        yield variant("mixed-prefill", prefill_kernel, tiles.prefill, _SPILLS, **mixed)
