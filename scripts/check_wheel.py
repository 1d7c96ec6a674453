"""Refuses a wheel that holds anything but the import package, or that lacks a part of it.

python scripts/check_wheel.py dist/triptych-*.whl
"""

import sys
import zipfile
from pathlib import Path

NEEDED = (
    "triptych/__init__.py",
    "triptych/py.typed",
    "triptych/v1/inference_pb2.py",
    "triptych/v1/inference_pb2.pyi",
    "triptych/v1/inference_pb2_grpc.py",
    "triptych/v1/sampler_pb2.py",
    "triptych/kserve/inference_pb2.py",
    "triptych/client/api.py",
    "triptych/engine_core/layout.py",
    "triptych/kernels/core/_core.",
    "triptych/kernels/cpu/_cpu.",
    "triptych/services/cli/__main__.py",
    "triptych/services/tokenizer/openai_http/ui/index.html",
    "triptych/services/tokenizer/openai_http/ui/app.js",
    "triptych/services/tokenizer/openai_http/ui/style.css",
)
UNWANTED_SUFFIXES = (".cpp", ".h", ".proto", "CMakeLists.txt", ".pyc")


def faults(names: list[str]) -> list[str]:
    """What is wrong with a wheel that holds these files."""
    strays = [n for n in names if not n.startswith("triptych/") and ".dist-info/" not in n]
    sources = [n for n in names if n.endswith(UNWANTED_SUFFIXES)]
    twice = sorted({n for n in names if names.count(n) > 1})
    missing = [need for need in NEEDED if not any(n.startswith(need) for n in names)]
    return [
        *(f"not part of the import package: {name}" for name in strays),
        *(f"a source that nobody runs: {name}" for name in sources),
        *(f"twice: {name}" for name in twice),
        *(f"missing: {name}" for name in missing),
    ]


def main() -> None:
    """Check the wheel named on the command line; exit 1 with its faults."""
    wheel = Path(sys.argv[1])
    names = zipfile.ZipFile(wheel).namelist()
    if found := faults(names):
        sys.exit("\n".join(found))
    print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main()
