"""Triton is a GPU's: an executor on the CPU never loads it, one on the emulated device no kernel of
ours (torch itself loads triton there, for its tensor subclasses, where it is installed)."""

import subprocess
import sys
from pathlib import Path

import pytest

from source_tree import REPO
from tiny_models import save, tiny_model

PROGRAM = """
import sys
from triptych.services.executor import __main__, worker
from triptych.services.executor.backend import BackendOptions, open_backend
from triptych.services.runtime.model_files import resolve_model
device, plan, path = sys.argv[1:]
options = BackendOptions(
    device=device, plan=plan, kv_cache_memory=1 << 20, threads=1, max_num_seqs=2,
    max_num_batched_tokens=32,
)
facts = open_backend(resolve_model(path), options).facts
unwanted = ("triptych.kernels.triton", "triton") if device == "cpu" else "triptych.kernels.triton"
print(facts.plan, *[name for name in sys.modules if name.startswith(unwanted)])
"""


@pytest.mark.parametrize(
    ("device", "plan"),
    [("cpu", "native"), ("cpu", "eager"), ("emulated", "cudagraph"), ("emulated", "eager")],
)
def test_no_executor_without_a_gpu_loads_triton(device: str, plan: str, tmp_path: Path) -> None:
    save(tiny_model("llama", {}), tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, device, plan, str(tmp_path)],
        cwd=REPO / "tests",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [plan]
