"""CPU kernels: one C++ module, a variant per instruction set; the best one until told another."""

from triptych.kernels.cpu._cpu import (
    PACKED_LAYOUT_VERSION,
    KvCache,
    Plan,
    active_isa,
    checksum,
    gate,
    kv_block_bytes,
    pack_groups_into,
    pack_into,
    packed_bytes,
    panel_shares,
    rms_norm,
    rotate,
    select_isa,
    soft_cap,
    supported_isas,
)

__all__ = [
    "PACKED_LAYOUT_VERSION",
    "KvCache",
    "Plan",
    "active_isa",
    "checksum",
    "gate",
    "kv_block_bytes",
    "pack_groups_into",
    "pack_into",
    "packed_bytes",
    "panel_shares",
    "rms_norm",
    "rotate",
    "select_isa",
    "soft_cap",
    "supported_isas",
]
