"""A step allocates nothing: malloc is counted, in a process of its own, by a preloaded library."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_models import tiny_model, write_gguf

_COUNTER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

static size_t calls;
size_t allocation_calls(void) { return __atomic_load_n(&calls, __ATOMIC_RELAXED); }
static void count(void) { __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED); }

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
void *malloc(size_t size) { count(); return __libc_malloc(size); }
void *calloc(size_t n, size_t size) { count(); return __libc_calloc(n, size); }
void *realloc(void *p, size_t size) { count(); return __libc_realloc(p, size); }
void *aligned_alloc(size_t align, size_t size) { count(); return __libc_memalign(align, size); }
"""

_PROGRAM = r"""
import ctypes, gc, sys
from step_driver import DrivenSequence, StepDriver
from triptych.services.executor.backend import BackendOptions, open_backend
from triptych.services.runtime.model_files import resolve_model

calls = ctypes.CDLL(sys.argv[2]).allocation_calls
calls.restype = ctypes.c_size_t
options = BackendOptions(plan="native", kv_cache_memory=1 << 22, threads=2)
backend = open_backend(resolve_model(sys.argv[1]), options)
backend.reserve(256)
driver = StepDriver(backend)


def allocations(rows):
    inputs = driver.inputs(rows)
    arrays = (
        inputs.token_ids, inputs.positions, inputs.slots, inputs.row_starts, inputs.kv_lengths,
        inputs.block_tables, inputs.logits_tokens, inputs.copy_sources, inputs.copy_targets,
        driver.logits,
    )
    counts = []
    for _ in range(5):
        before = calls()
        backend.plan.step(*arrays)
        counts.append(calls() - before)
    return min(counts)


gc.disable()
# What the call from Python itself takes is the same for any step.
small = allocations([(DrivenSequence(), [1])])
large = allocations([(DrivenSequence(), [1] * n) for n in (100, 1, 1, 40, 70, 7, 1, 36)])
assert calls() > 0
print(small, large)
assert small == large, (small, large)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the counter")
def test_a_step_allocates_nothing(tmp_path: Path) -> None:
    source, library = tmp_path / "counter.c", tmp_path / "counter.so"
    source.write_text(_COUNTER)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    write_gguf(
        tiny_model("llama", {"hidden_size": 96, "intermediate_size": 160}),
        tmp_path / "m.gguf",
        type_of=lambda _: "Q8_0",
    )
    support = Path(__file__).parents[1] / "support"
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "m.gguf"), str(library)],
        env={"LD_PRELOAD": str(library), "PYTHONPATH": str(support)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
