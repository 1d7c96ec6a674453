"""Rotary embedding and the write of keys and values into the paged cache, in one kernel."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from triptych.kernels.triton.variants import Variant

_HEADS = 8  # of a program: one warp's, four at a time for heads of 128 columns of 16 bits


@triton.jit
def e4m3_code(x):
    """Numbers from -448 to 448 as float8_e4m3fn, uint8; to the nearest, to the even one of two.

    By hand, since Ampere has no instruction for it; the same bits on every device.
    """
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, which is the last bit of numbers from 2^14 on.
    small = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)


@triton.jit
def code_of(x, scale, CODES: tl.constexpr):
    """x [HEADS, HALF] over scale [HEADS], as the cache holds it."""
    scaled = tl.where(scale[:, None] > 1e-30, tl.div_rn(x, scale[:, None] + tl.zeros_like(x)), 0.0)
    if CODES == "int8":
        # Adding 1.5 * 2^23 leaves no bits for a fraction: rounds to the nearest, ties to even.
        codes = ((scaled + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        codes = e4m3_code(scaled)
    return codes


@triton.jit
def store_heads(
    first, second, cache, scales, place, scale_place, columns, within,
    HALF_DIM: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Store heads, given by the halves of their columns: place [HEADS, 1] of each in the cache."""
    if CODES is None:
        kind = cache.dtype.element_ty
        tl.store(cache + place + columns, first.to(kind), mask=within)
        tl.store(cache + place + columns + HALF_DIM, second.to(kind), mask=within)
    else:
        peak = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1)
        # A maximum may pass NaN over.
        finite = (tl.abs(first) < float("inf")) & (tl.abs(second) < float("inf"))
        LARGEST: tl.constexpr = 127.0 if CODES == "int8" else 448.0
        scale = tl.div_rn(peak, tl.zeros_like(peak) + LARGEST)
        scale = tl.where(tl.min(finite.to(tl.int32), 1) == 1, scale, float("nan"))
        tl.store(cache + place + columns, code_of(first, scale, CODES), mask=within)
        tl.store(cache + place + columns + HALF_DIM, code_of(second, scale, CODES), mask=within)
        tl.store(scales + scale_place, scale, mask=tl.max(within.to(tl.int32), 1) == 1)


@triton.jit
def rotary_store_kernel(
    qkv, positions, cos_sin, slots, k_cache, v_cache, k_scales, v_scales,
    qkv_stride, cos_sin_stride, block_stride, slot_stride, head_stride,
    scale_block_stride, scale_slot_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """A program: HEADS heads of a token, of q, k or v.

    Both columns of a pair are one thread's, so nothing is read that another has written.
    """
    Q_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        columns = tl.arange(0, HALF)[None, :]
        of_q = part < Q_PARTS
        of_k = (part >= Q_PARTS) & (part < Q_PARTS + KV_PARTS)
        own = tl.where(of_q, part, (part - Q_PARTS) % KV_PARTS) * HEADS + tl.arange(0, HEADS)
        before = tl.where(of_q, 0, tl.where(of_k, NUM_HEADS, NUM_HEADS + NUM_KV_HEADS))
        heads = own[:, None]
        within = (heads < tl.where(of_q, NUM_HEADS, NUM_KV_HEADS)) & (columns < HALF_DIM)
        row = qkv + token.to(tl.int64) * qkv_stride + (before + heads) * HEAD_DIM + columns
        first = tl.load(row, mask=within, other=0).to(tl.float32)
        second = tl.load(row + HALF_DIM, mask=within, other=0).to(tl.float32)
        kind = qkv.dtype.element_ty

        place = (slot // BLOCK_SIZE).to(tl.int64) * block_stride + slot % BLOCK_SIZE * slot_stride
        scale_place = own
        if CODES is not None:
            scale_place = own + (
                (slot // BLOCK_SIZE).to(tl.int64) * scale_block_stride
                + slot % BLOCK_SIZE * scale_slot_stride
            )
        if of_q | of_k:
            angles = cos_sin + tl.load(positions + token).to(tl.int64) * cos_sin_stride + columns
            cos = tl.load(angles, mask=columns < HALF_DIM, other=0)
            sin = tl.load(angles + HALF_DIM, mask=columns < HALF_DIM, other=0)
            turned_first = (first * cos - second * sin).to(kind)
            turned_second = (second * cos + first * sin).to(kind)
            if of_q:
                tl.store(row, turned_first, mask=within)
                tl.store(row + HALF_DIM, turned_second, mask=within)
            else:
                store_heads(
                    turned_first.to(tl.float32), turned_second.to(tl.float32), k_cache, k_scales,
                    place + heads * head_stride, scale_place, columns, within, HALF_DIM, CODES,
                )  # fmt: skip
        else:
            store_heads(
                first, second, v_cache, v_scales,
                place + heads * head_stride, scale_place, columns, within, HALF_DIM, CODES,
            )  # fmt: skip


def rotary_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """As `kernels.reference.rotary_store`, but the columns of k are left alone.

    qkv's columns, the heads of scales, and the columns of caches lie side by side; keys and values
    (and their scales) have the same strides. Raises ValueError where block_size is no power of two
    or shapes do not match.
    """
    num_tokens, columns = qkv.shape
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    if block_size & (block_size - 1):
        raise ValueError(f"block_size {block_size} is no power of two")
    if columns != (num_heads + 2 * num_kv_heads) * head_dim or cos_sin.shape[1] != head_dim:
        raise ValueError(
            f"qkv of {columns} columns and angles of {cos_sin.shape[1]} for {num_heads} and "
            f"{num_kv_heads} heads of {head_dim}"
        )
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1 or qkv.stride(1) != 1:
        raise ValueError("keys and values must have the same strides, and columns side by side")
    codes = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(k_cache.dtype)
    if (codes is None) != (scales is None):
        raise ValueError("scales are for int8 and float8 caches, and those need them")
    if codes == "fp8":
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    if num_tokens == 0:
        return
    k_scales, v_scales = scales or (None, None)
    parts = triton.cdiv(num_heads, _HEADS) + 2 * triton.cdiv(num_kv_heads, _HEADS)
    rotary_store_kernel[(num_tokens, parts)](
        qkv, positions, cos_sin, slots, k_cache, v_cache, k_scales, v_scales,
        qkv.stride(0), cos_sin.stride(0), *k_cache.stride()[:3],
        *((0, 0) if k_scales is None else k_scales.stride()[:2]),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        HALF=triton.next_power_of_2(head_dim // 2), HEADS=_HEADS, BLOCK_SIZE=block_size,
        CODES=codes, num_warps=1,
    )  # fmt: skip


def variants() -> Iterator[Variant]:
    """What the launcher uses."""
    strides = ("qkv_stride", "cos_sin_stride", "block_stride", "slot_stride", "head_stride")
    for name, cache in (
        ("bf16", "*bf16"), ("fp16", "*fp16"), ("fp32", "*fp32"), ("int8", "*i8"), ("fp8", "*u8")
    ):  # fmt: skip
        codes = name if name in {"int8", "fp8"} else None
        scales = dict.fromkeys(("k_scales", "v_scales"), "*fp32" if codes else None)
        for head_dim in (64, 80, 128, 256):
            yield Variant(
                f"{name}-{head_dim}", rotary_store_kernel,
                {
                    "qkv": "*bf16" if codes else cache, "positions": "*i32", "cos_sin": "*fp32",
                    "slots": "*i32", "k_cache": cache, "v_cache": cache,
                    **{key: kind for key, kind in scales.items() if kind},
                    **dict.fromkeys((*strides, "scale_block_stride", "scale_slot_stride"), "i32"),
                },
                {
                    **{key: None for key, kind in scales.items() if kind is None},
                    "NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": head_dim,
                    "HALF": triton.next_power_of_2(head_dim // 2), "HEADS": _HEADS,
                    "BLOCK_SIZE": 16, "CODES": codes,
                },
                aligned=frozenset(strides), num_warps=1,
            )  # fmt: skip
