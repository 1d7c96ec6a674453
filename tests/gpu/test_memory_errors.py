"""Kernels under compute-sanitizer: no access outside what they were given."""

import shutil
import subprocess
import sys

import pytest

from source_tree import REPO

SANITIZER = shutil.which("compute-sanitizer")
FAULTS = 86

# Odd sizes, each tensor an allocation of its own, so that a step over its end is seen.
PROGRAM = """
import sys
sys.path.insert(0, "tests/support")
import numpy as np
import torch
from device_samples import columns, random_ask
from triptych.kernels.triton.embedding import embed
from triptych.kernels.triton.matmul import matmul
from triptych.kernels.triton.rms_norm import add_rms_norm
from triptych.kernels.triton.sampler import sample, sampler_workspace
from triptych.kernels.triton.silu_gate import silu_gate
torch.set_default_device("cuda")
rng = np.random.default_rng(1)
asks = [random_ask(rng, 3, 777) for _ in range(9)]
logits, out = torch.randn(3, 777), torch.empty(9, dtype=torch.int32)
sample(logits, columns(asks), 777, out, sampler_workspace(9, 777, "cuda", piece=256))
x = torch.randn(5, 333, dtype=torch.bfloat16)
residual, normed = torch.zeros_like(x), torch.empty_like(x)
add_rms_norm(x, residual, torch.ones(333), 1e-5, normed)
weight, product = torch.randn(62, 333, dtype=torch.bfloat16), torch.empty(5, 62, dtype=x.dtype)
matmul(normed, weight, product)
gated = torch.empty(5, 31, dtype=x.dtype)
silu_gate(product, gated)
rows = torch.empty(4, 333, dtype=x.dtype)
embed(torch.tensor([0, 61, 62, -1], dtype=torch.int32), weight, 0, rows)
torch.cuda.synchronize()
print("ran", out.tolist(), bool(gated.isfinite().all()))
"""


@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed")
def test_no_kernel_reaches_outside() -> None:
    assert SANITIZER is not None
    done = subprocess.run(
        [
            "env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", SANITIZER, "--tool", "memcheck",
            f"--error-exitcode={FAULTS}", "--print-limit", "5", sys.executable, "-c", PROGRAM,
        ],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        check=False,
    )  # fmt: skip
    if "ran" not in done.stdout and "not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not take this device")
    assert done.returncode == 0, done.stdout
    assert "ran" in done.stdout
