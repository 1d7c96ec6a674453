"""A call of attention: its tensors as the kernels' arguments, and the launches."""

import math
from dataclasses import dataclass

import torch
import triton

from triptych.kernels.triton.attention_forms import (
    PARTITION,
    AttentionTiles,
    Codes,
    attention_tiles,
    device_kind,
    wide_of,
)
from triptych.kernels.triton.attention_prefill import prefill_kernel
from triptych.kernels.triton.attention_split import merge_kernel, split_kernel

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """As `paged_attention.prefill_attention`; row_starts None: as `decode_attention`."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    row_starts: torch.Tensor | None
    kv_lengths: torch.Tensor
    out: torch.Tensor
    scale: float
    window: int | None
    soft_cap: float | None
    scales: tuple[torch.Tensor, torch.Tensor] | None

    @property
    def num_rows(self) -> int:
        """Sequences."""
        return len(self.kv_lengths)

    @property
    def group(self) -> int:
        """Query heads of a key-value head."""
        return int(self.q.shape[1] // self.k_cache.shape[2])

    @property
    def longest(self) -> int:
        """Tokens that a block table has room for."""
        return int(self.block_tables.shape[1] * self.k_cache.shape[1])

    @property
    def codes(self) -> Codes | None:
        """How the caches hold numbers; None where they are floats."""
        match self.k_cache.dtype:
            case torch.int8:
                return "int8"
            case torch.float8_e4m3fn:
                return "fp8" if device_kind(self.q.device).e4m3 else "fp8_bits"
            case torch.float32 | torch.float16 | torch.bfloat16:
                return None
            case other:
                raise ValueError(f"a cache of {other}")

    @property
    def float_type(self) -> torch.dtype:
        """What scores are computed from: the queries' type unless the cache's floats are others."""
        same = self.codes is not None or self.k_cache.dtype == self.q.dtype
        return self.q.dtype if same else torch.float32

    @property
    def tiles(self) -> AttentionTiles:
        """The kernels' tiles. Raises ValueError where there are none."""
        wide = wide_of(self.q.shape[2])
        return attention_tiles(wide, self.float_type, self.codes, device_kind(self.q.device))

    def check(self) -> None:
        """Raise ValueError for shapes that there are no kernels for."""
        q, keys, values, scales = self.q, self.k_cache, self.v_cache, self.scales
        if keys.shape[1] & (keys.shape[1] - 1):
            raise ValueError(f"block_size {keys.shape[1]} is no power of two")
        if q.shape[1] % keys.shape[2]:
            raise ValueError(
                f"{q.shape[1]} heads are no multiple of {keys.shape[2]} key-value heads"
            )
        if values.stride() != keys.stride() or keys.stride(3) != 1 or q.stride(2) != 1:
            raise ValueError("keys and values must have the same strides, columns side by side")
        if (self.codes is None) != (scales is None):
            raise ValueError("scales are for int8 and float8 caches, and those need them")
        if scales is not None and (
            scales[0].stride() != scales[1].stride() or scales[0].stride(2) != 1
        ):
            raise ValueError("scales must have the same strides, heads side by side")

    def split(self, workspace: torch.Tensor, few: int) -> int:
        """Compute sequences of up to `few` queries; (query, item)s that the workspace has room for.

        Those that do not fit are left for `whole`.
        """
        _, num_heads, head_dim = self.q.shape
        tiles, result = self.tiles, num_heads * (head_dim + 2)
        capacity = workspace.numel() // result
        if capacity == 0:
            raise ValueError(
                f"a workspace of {workspace.numel()} elements is below decode_workspace's {result}"
            )
        sums = workspace[: capacity * num_heads * head_dim]
        stats = workspace[sums.numel() :]
        form, items = self._form(), self._items(few, capacity)
        split_kernel[(device_kind(self.q.device).multiprocessors * tiles.programs,)](
            **form, **items, sums_out=sums, stats_out=stats, num_kv_heads=self.k_cache.shape[2],
            ROWS=tiles.decode.rows, KEYS=tiles.decode.keys,
            num_warps=tiles.decode.num_warps, num_stages=tiles.decode.num_stages,
        )  # fmt: skip
        shared = {key: form[key] for key in ("HEAD_DIM", "WIDE", "PARTITION", "WINDOWED", "window")}
        merge_kernel[(self.num_rows * few, num_heads)](
            **shared, **items, **self._written(), sums_in=sums, stats_in=stats,
            num_heads=num_heads, num_warps=1,
        )  # fmt: skip
        return capacity

    def whole(self, few: int = 0, capacity: int = 0) -> None:
        """Compute all sequences, each query by one program a key-value head; with `few`, those that
        `split` left."""
        tiles = self.tiles.prefill
        if self.row_starts is None:
            parts = self.num_rows * triton.cdiv(self.group, tiles.rows)
        else:
            parts = len(self.q) * self.group // tiles.rows + self.num_rows
        prefill_kernel[(parts, self.k_cache.shape[2])](
            **self._form(), **self._items(few, capacity), **self._written(),
            ROWS=tiles.rows, KEYS=tiles.keys,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip

    def _written(self) -> dict[str, object]:
        out = self.out
        return {"out": out, "out_token_stride": out.stride(0), "out_head_stride": out.stride(1)}

    def _items(self, few: int, capacity: int) -> dict[str, object]:
        """What `count_items` works on. ROW_SLOTS out of few: each is a kernel to compile."""
        slots = next((slots for slots in (16, 128, 1024) if self.num_rows <= slots), None)
        return {
            "row_starts": self.row_starts, "kv_lengths": self.kv_lengths,
            "num_rows": self.num_rows, "capacity": capacity, "FEW": few,
            "ROW_SLOTS": slots or triton.next_power_of_2(self.num_rows),
        }  # fmt: skip

    def _form(self) -> dict[str, object]:
        """What the kernels with queries share, but for `_items`."""
        q, keys, values = self.q, self.k_cache, self.v_cache
        if keys.dtype == torch.float8_e4m3fn:
            keys, values = keys.view(torch.uint8), values.view(torch.uint8)
        k_scales, v_scales = self.scales or (None, None)
        cap = self.soft_cap
        return {
            "q": q, "q_token_stride": q.stride(0), "q_head_stride": q.stride(1),
            "k_cache": keys, "v_cache": values, "k_scales": k_scales, "v_scales": v_scales,
            "block_tables": self.block_tables, "table_stride": self.block_tables.stride(0),
            "block_stride": keys.stride(0), "slot_stride": keys.stride(1),
            "head_stride": keys.stride(2),
            "scale_block_stride": 0 if k_scales is None else k_scales.stride(0),
            "scale_slot_stride": 0 if k_scales is None else k_scales.stride(1),
            "factor": (self.scale if cap is None else cap) * _LOG2_E,
            "cap_factor": 0.0 if cap is None else 2 * _LOG2_E * self.scale / cap,
            "window": self.window or 0,
            "GROUP": self.group, "HEAD_DIM": q.shape[2], "WIDE": wide_of(q.shape[2]),
            "PARTITION": PARTITION, "BLOCK_SIZE": keys.shape[1], "CODES": self.codes,
            "WINDOWED": self.window is not None, "CAPPED": cap is not None,
            "FLOAT32": self.float_type == torch.float32,
        }  # fmt: skip
