"""What bit-equality of decode and prefill rests on beside what the interpreter can show.

Compiled for real devices, both kernels must use the same MMA instructions but for their width,
and sum over a tile's keys in the same order: with the same layout along the keys.
"""

import re
from typing import Any

import pytest

pytest.importorskip("triton")

from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from triptych.kernels.triton.attention_variants import attention_variants
from triptych.kernels.triton.variants import Variant

VARIANTS = {variant.name: variant for variant in attention_variants()}
FORMS = ["bf16-64-group4", "bf16-128-group4", "bf16-256-group4", "fp32-64-group4"]
CODED = ["bf16-128-int8-group4"]


def compiled(variant: Variant, device: int) -> Any:
    names = variant.kernel.arg_names
    source = ASTSource(
        fn=variant.kernel,
        signature={name: variant.arguments.get(name, "constexpr") for name in names},
        constexprs=dict(variant.constants),
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if name in variant.aligned or variant.arguments.get(name, "").startswith("*")
        },
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    return triton_compile(source, target=GPUTarget("cuda", device, 32), options=options)


def sums_over_keys(text: str) -> list[tuple[str, ...]]:
    """Of each reduction of a tile's keys, in order: the keys, and their layout's parts."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<\{.*\}>)", text, re.MULTILINE))
    found = []
    for keys, layout in re.findall(
        r"axis = 1 : i32\}>.*?\}\) : \(tensor<\d+x(\d+)xf32, (#\w+)>\)", text, re.DOTALL
    ):
        parts = re.findall(r"(\w+) = \[(\d+), (\d+)(?:, \d+)?\]", layouts[layout])
        version = re.findall(r"versionMajor = \d+", layouts[layout])
        # instrShape of an MMA is [16, n]; all else is [along queries, along keys].
        found.append((keys, *version, *(f"{name} {along}" for name, _, along in parts)))
    return found


def instructions(ptx: str) -> set[str]:
    """Matrix instructions but for their width: n counts columns, which are independent."""
    found = re.findall(r"(?:wgmma\.mma_async|mma)\.sync\.aligned\.[\w.]+", ptx)
    return {re.sub(r"m(\d+)n\d+k", r"m\1k", name) for name in found}


@pytest.mark.parametrize("device", [80, 90])
@pytest.mark.parametrize("form", FORMS + CODED)
def test_decode_and_prefill_sum_alike(form: str, device: int) -> None:
    split, prefill = (
        compiled(VARIANTS[f"{part}-{form}-sm{device}"], device) for part in ("split", "prefill")
    )
    sums = sums_over_keys(split.asm["ttgir"])
    assert len(sums) == 2  # the maximum and the total
    assert sums_over_keys(prefill.asm["ttgir"]) == sums
    kinds = instructions(split.asm["ptx"])
    assert instructions(prefill.asm["ptx"]) == kinds
    assert bool(kinds) == ("fp32" not in form)
    if device == 90:
        assert all(kind.startswith("wgmma") for kind in kinds)
