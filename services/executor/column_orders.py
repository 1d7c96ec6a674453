"""Act order: weights whose columns are packed sorted by group, and inputs that follow them.

The output of the MLP's gate is reordered for nothing, by the rows of the matrices that make it.
Elsewhere the plan takes its inputs in the order that the matrices have; matrices that share an
input have to share its order, as those quantised by GPTQ do: it sorts by the inputs' magnitudes.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from triptych.services.executor.raw_weights import StoredTensor

Order = npt.NDArray[np.int64]

_SHARED = {"qkv_order": ("q", "k", "v"), "output_order": ("output",), "mlp_order": ("gate", "up")}
"""What the plan calls an input's order, and the matrices that it multiplies."""


def with_ordered_producers(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The plan's tensors by name, gate and up with rows in the order of down's columns."""
    ordered = dict(tensors)
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind == "down" and tensor.column_order is not None:
            for producer in (f"{layer}.gate", f"{layer}.up"):
                ordered[producer] = ordered[producer].with_rows(tensor.column_order)
    return ordered


def why_not_ordered(tensors: Mapping[str, StoredTensor]) -> str | None:
    """Which orders the plan's inputs cannot have; None when they can have all."""
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if not layer and tensor.column_order is not None:
            return f"columns in another order ({tensor.name})"
        for kinds in _SHARED.values():
            others = [tensors[f"{layer}.{each}"] for each in kinds if kind == kinds[0]]
            if not all(_same(each.column_order, tensor.column_order) for each in others):
                return f"columns in other orders than those of {', '.join(kinds)} ({tensor.name})"
    return None


def input_orders(orders: Mapping[str, Order | None]) -> dict[str, npt.NDArray[np.int32]]:
    """What the plan is told, from the column orders of its tensors by name."""
    told = {}
    for name, order in orders.items():
        layer, _, kind = name.rpartition(".")
        for called, kinds in _SHARED.items():
            if kind == kinds[0] and layer and order is not None:
                told[f"{layer}.{called}"] = order.astype(np.int32)
    return told


def _same(one: Order | None, other: Order | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)
