"""Benchmark modules for tests. bench/ is no package and stays off the path: its kernels.py would
answer for Hugging Face's package of that name."""

import importlib.util
import sys
from types import ModuleType

from source_tree import REPO


def load_bench_module(name: str) -> ModuleType:
    """Import bench/<name>.py, which must not import its neighbours."""
    full = f"bench_{name.replace('/', '_')}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, REPO / "bench" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]
