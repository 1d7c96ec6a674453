"""Which matrix products take 8-bit activations: one choice per role, for prefill and decode alike.

Activations that meet quantised weights are rounded per block of 32, to 16 or to 8 bits. Products of
8 bits take about two thirds of the time; what their rounding costs differs from role to role.
docs/performance.md has the measurements behind `auto`.
"""

from typing import Literal

ActivationDtype = Literal["auto", "int16", "int8"]

_INT16, _INT8 = 32767, 127  # the largest codes

ROLES = ("qkv", "output", "gate_up", "down", "head")
_AUTO_INT8 = frozenset({"gate_up"})  # half of a layer's products, a fifth of the harm


def activation_limits(dtype: ActivationDtype) -> dict[str, int]:
    """The largest activation code of each role, as the plan takes it."""
    match dtype:
        case "int16":
            chosen: frozenset[str] = frozenset()
        case "int8":
            chosen = frozenset(ROLES)
        case "auto":
            chosen = _AUTO_INT8
    return {role: _INT8 if role in chosen else _INT16 for role in ROLES}
