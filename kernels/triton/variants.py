"""How kernels are compiled ahead of time: each module of this package lists its own variants.

A module with kernels has a function `variants() -> Iterator[Variant]` that yields, for each kernel,
what its launcher really uses: dtypes, tile shapes, warps. `scripts/compile_kernels.py` compiles
them all and reports registers, spills and shared memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


class Kernel(Protocol):
    """What `triton.jit` makes of a function."""

    @property
    def __name__(self) -> str:
        """Of the function."""

    @property
    def arg_names(self) -> list[str]:
        """Of its arguments, in order."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with the types and constants that it is launched with.

    `name` is unique within its module, such as "bf16-128". `arguments`: Triton's type for each
    argument that is no constant, by name: "*bf16", "*fp8e4nv", "i32", "fp32". `constants`: the
    tl.constexpr ones, and None for pointers that are not given. Pointers are taken to be aligned to
    16 bytes; `aligned` names the integers that are multiples of 16 in what this variant is for.
    `devices`: compute capabilities it is for.
    `fp_fusion`: whether products and sums may be fused (enable_fp_fusion at the launch).
    `max_spills`: bytes per thread that are borne, with a reason beside them.
    """

    name: str
    kernel: Kernel
    arguments: Mapping[str, str]
    constants: Mapping[str, object] = field(default_factory=dict)
    aligned: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 3
    devices: tuple[int, ...] = (80, 90)
    fp_fusion: bool = True
    max_spills: int = 0
