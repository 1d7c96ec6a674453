"""What `triptych doctor` says of GPUs. Nothing here initialises CUDA: doctor forks an engine."""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

from triptych.services.cli.doctor_checks import Finding

_QUERY = "--query-gpu=name,driver_version,memory.total,compute_cap"
_TIMEOUT = 20.0  # seconds: a driver that is loaded on demand takes a few
_LEAST_CAPABILITY = (8, 0)


def gpu() -> Finding:
    """NVIDIA devices, their driver, and whether torch and triton can use them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding("gpu", "ok", f"none (no NVIDIA driver); {_packages()}")
    try:
        rows = _ask(tool)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stdout", "") or str(error)
        first = str(said).strip().partition("\n")[0]
        return Finding("gpu", "warn", f"nvidia-smi: {first}", "repair the NVIDIA driver")
    if not rows:
        return Finding("gpu", "ok", f"none, though there is an NVIDIA driver; {_packages()}")
    detail = f"{'; '.join(map(_described, rows))}; {_packages()}"
    remedy = _what_is_missing(rows)
    return Finding("gpu", "warn" if remedy else "ok", detail, remedy)


def _ask(tool: str) -> list[list[str]]:
    """Name, driver, memory in MiB and compute capability of each device."""
    done = subprocess.run(
        [tool, _QUERY, "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=True,
    )
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == 4]


def _described(row: list[str]) -> str:
    name, driver, memory, capability = row
    return f"{name}, {memory} MiB, compute capability {capability}, driver {driver}"


def _what_is_missing(rows: list[list[str]]) -> str:
    capabilities = [tuple(map(int, re.findall(r"\d+", row[3])[:2])) for row in rows]
    if torch_cuda() is None:
        return "to use it, install a build of torch with CUDA (docs/gpu.md)"
    if _version("triton") is None:
        return "to use it, install triton: pip install triton"
    if all(capability < _LEAST_CAPABILITY for capability in capabilities):
        return "a GPU of compute capability 8.0 or later is needed: --device cuda is refused"
    return ""


def torch_cuda() -> str | None:
    """The CUDA version that torch was built for; None without. Read, not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text()
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None


def _packages() -> str:
    cuda, triton = torch_cuda(), _version("triton")
    torch = f"torch {_version('torch') or 'is not installed'}"
    return f"{torch} {f'for CUDA {cuda}' if cuda else 'without CUDA'}, triton {triton or 'none'}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
