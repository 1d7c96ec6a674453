"""Compiles every variant of every kernel in kernels/triton for real devices, without having one.

    python scripts/compile_kernels.py [--arch 80 90] [--only sampler] [--jobs 2] [--json FILE]

Prints a table of registers, spills and shared memory a kernel and device; writes all variants as
json. Exits 1 where one does not compile, spills more than its variant allows, or needs more shared
memory than the device has. Runs without the interpreter: Triton's compiler needs no GPU.
"""

import argparse
import importlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triptych.kernels import triton as kernels
from triptych.kernels.triton.variants import Variant

DEVICES = {80: "sm_80", 90: "sm_90a"}
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10}
"""Bytes that one program may have: CUDA C++ programming guide, compute capabilities."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came of a variant on a device; `fault` says what is wrong with it, if anything."""

    module: str
    kernel: str
    variant: str
    device: str
    num_warps: int
    registers: int
    spills: int
    shared: int
    cubin_bytes: int
    seconds: float
    fault: str = ""


def modules(only: str) -> list[str]:
    """Names of the modules that list variants."""
    names = [found.name for found in pkgutil.iter_modules(kernels.__path__)]
    return sorted(name for name in names if only in name)


def variants(module: str) -> Iterator[Variant]:
    """Those that a module lists."""
    found = importlib.import_module(f"{kernels.__name__}.{module}")
    if hasattr(found, "variants"):
        yield from found.variants()


def compile_one(module: str, index: int, arch: int) -> Compiled:
    """Compile one variant. Faults are reported, not raised: the others are of interest too."""
    variant = list(variants(module))[index]
    start = time.perf_counter()
    registers = spills = shared = size = 0
    try:
        binary = _compile(variant, arch)
        shared, size = binary.metadata.shared, len(binary.asm["cubin"])
        fusion = () if variant.fp_fusion else ("--fmad=false",)
        registers, spills = resources(binary.asm["ptx"], DEVICES[arch], *fusion)
        fault = _fault(variant, arch, spills, shared)
    except Exception as error:  # whatever a compiler can say
        chain = [error, error.__cause__] if error.__cause__ else [error]
        fault = "; from ".join(f"{type(one).__name__}: {one}" for one in chain)
    return Compiled(
        module, variant.kernel.__name__, variant.name, DEVICES[arch], variant.num_warps,
        registers, spills, shared, size, round(time.perf_counter() - start, 2), fault,
    )  # fmt: skip


def _compile(variant: Variant, arch: int) -> Any:
    """Triton's CompiledKernel, which has no types."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    given = variant.arguments.keys() | variant.constants.keys()
    if missing := [name for name in names if name not in given]:
        raise ValueError(f"no type or constant for {missing}")
    if strange := sorted(given - {*names}):
        raise ValueError(f"the kernel has no {strange}")
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name in variant.aligned or variant.arguments.get(name, "").startswith("*")
    }
    source = ASTSource(
        fn=variant.kernel,
        signature={name: variant.arguments.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in variant.constants.items()},
        attrs=aligned,
    )
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "enable_fp_fusion": variant.fp_fusion,
    }
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _fault(variant: Variant, arch: int, spills: int, shared: int) -> str:
    if spills > variant.max_spills:
        return f"spills {spills} bytes a thread, {variant.max_spills} are borne"
    if shared > SHARED_MEMORY[arch]:
        return f"{shared} bytes of shared memory, the device has {SHARED_MEMORY[arch]}"
    return ""


def resources(ptx: str, device: str, *options: str) -> tuple[int, int]:
    """(registers, bytes spilled) a thread of the kernel in a PTX text, as the assembler says."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        done = subprocess.run(
            [tool("ptxas"), "-v", *options, f"--gpu-name={device}", file.name, "-o", os.devnull],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
    registers = re.search(r"Used (\d+) registers", done.stdout)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stdout)
    if registers is None or not spills:
        raise ValueError(f"ptxas says nothing of registers: {done.stdout!r}")
    return int(registers[1]), max(map(int, spills))


def tool(name: str) -> str:
    """The path of one of CUDA's binary tools: those that Triton brings, or the machine's."""
    import triton

    for folder in Path(triton.__file__).parent.glob("backends/nvidia/bin*"):
        if (folder / name).is_file():
            return str(folder / name)
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is neither in Triton's wheel nor on this machine")
    return found


def table(results: list[Compiled]) -> str:
    """Markdown: a row a kernel and device, the worst of its variants."""
    lines = [
        "| kernel | device | variants | registers | spills | shared memory | faults |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    groups: dict[tuple[str, str], list[Compiled]] = {}
    for result in results:
        groups.setdefault((f"{result.module}.{result.kernel}", result.device), []).append(result)
    for (kernel, device), group in sorted(groups.items()):
        lines.append(
            f"| {kernel} | {device} | {len(group)} | {max(r.registers for r in group)} | "
            f"{max(r.spills for r in group)} | {max(r.shared for r in group) / 1024:.0f} KiB | "
            f"{sum(bool(r.fault) for r in group)} |"
        )
    return "\n".join(lines)


def compile_share(options: argparse.Namespace) -> list[Compiled]:
    """Every options.jobs-th variant, from options.share on."""
    work = [
        (module, index, arch)
        for module in modules(options.only)
        for index, variant in enumerate(variants(module))
        for arch in options.arch
        if arch in variant.devices
    ]
    return [compile_one(*each) for each in work[options.share :: options.jobs]]


def compile_all(arguments: list[str], jobs: int) -> list[Compiled]:
    """All shares at once, each in a process of its own."""
    children = [
        subprocess.Popen(
            [sys.executable, "-P", __file__, *arguments, "--share", str(share)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for share in range(jobs)
    ]
    texts = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        sys.exit("a compiling process ended early")
    return [Compiled(**each) for text in texts for each in json.loads(text)]


def main() -> None:
    """Compile, print, write; exit 1 with the faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--only", default="", help="modules whose name has this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path("build/kernels.json"))
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share is not None:
        print(json.dumps([asdict(result) for result in compile_share(options)]))
        return
    results = compile_all(sys.argv[1:], options.jobs)
    results.sort(key=lambda each: (each.module, each.kernel, each.variant, each.device))
    print(table(results))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    if faults := [r for r in results if r.fault]:
        for r in faults:
            print(f"{r.module}.{r.kernel} [{r.variant}] {r.device}: {r.fault}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
