"""Which part may import which: the dependency direction of docs/architecture.md, checked.

(import-linter cannot see folders without `__init__.py`, so the rule is spelled out here.)
"""

import ast
import subprocess
import sys

import pytest

from source_tree import PACKAGE_FOLDERS, REPO, Source, dotted, sources, within

SHARED = ("engine_core", "kernels", "v1", "services.runtime", "services.transport")
MAY_IMPORT = {
    "engine_core": ("engine_core",),
    "kernels": ("kernels",),
    "client": ("client", "v1"),
    "services.runtime": ("engine_core", "v1", "services.runtime"),
    "services.transport": ("engine_core", "v1", "services.runtime", "services.transport"),
    "services.tokenizer": (*SHARED, "kserve", "services.tokenizer"),
    "services.scheduler": (*SHARED, "services.scheduler"),
    "services.executor": (*SHARED, "services.executor"),
    "services.simulator": (
        "engine_core",
        "kernels.core",
        "services.simulator",
        "services.scheduler.deadlines",  # of time-outs, by any clock
    ),
    "services.cli": (
        "v1",
        "services.runtime",
        "services.cli",
        "services.simulator",
        *(
            f"services.{process}.{module}"
            for process in ("tokenizer", "scheduler", "executor")
            for module in ("settings", "__main__")
        ),
        "services.tokenizer.tokenizer",  # doctor loads a model's tokenizer to see whether it can
    ),
}
MAY_IMPORT_TORCH = ("kernels.reference", "kernels.triton", "services.executor")
IMPURE = {"asyncio", "ctypes", "io", "mmap", "os", "pathlib", "random", "secrets", "select",
          "socket", "subprocess", "tempfile", "threading", "time", "uuid"}  # fmt: skip
SETTINGS = "services/runtime/settings.py"

# What a process must not have loaded, whatever module of its own it imports.
NOT_LOADED = {
    "services.tokenizer": (
        "numpy", "torch", "transformers", "triptych.kernels", "triptych.services.scheduler",
        "triptych.services.executor",
    ),
    "services.scheduler": (
        "torch", "transformers", "tokenizers", "jinja2", "gguf", "llguidance",
        "triptych.services.tokenizer", "triptych.services.executor",
    ),
    "services.executor": (
        "transformers", "jinja2", "llguidance", "triptych.services.tokenizer",
        "triptych.services.scheduler",
    ),
    "services.simulator": ("torch", "transformers", "tokenizers", "llguidance", "grpc", "zmq"),
    "client": (
        "numpy", "torch", "zmq", "tokenizers", "pydantic", "triptych.services",
        "triptych.engine_core", "triptych.kernels",
    ),
    "services.cli.__main__": ("torch", "transformers", "tokenizers"),
    # Whose children are forked with all that it has loaded.
    "services.cli.serve": (
        "torch", "transformers", "tokenizers", "llguidance", "numpy", "rich", "yaml",
    ),
}  # fmt: skip


def layer_of(source: Source) -> str:
    found = [layer for layer in MAY_IMPORT if within(source.name, layer)]
    assert len(found) == 1, f"{source.shown}: say in MAY_IMPORT what {source.name} may import"
    return found[0]


@pytest.mark.parametrize("source", sources(*PACKAGE_FOLDERS), ids=lambda source: source.name)
def test_imports_point_down(source: Source) -> None:
    allowed = tuple(f"triptych.{part}" for part in MAY_IMPORT[layer_of(source)])
    for name in source.imports():
        if within(name, "triptych") and name not in ("triptych", "triptych.__version__"):
            assert any(within(name, part) for part in allowed), f"{source.shown} imports {name}"


def test_engine_core_needs_the_standard_library_only() -> None:
    for source in sources("engine_core"):
        for name in source.imports():
            root = name.partition(".")[0]
            assert root == "triptych" or root in sys.stdlib_module_names - IMPURE, (
                f"{source.shown} imports {name}"
            )


def test_only_the_executor_and_the_torch_kernels_import_torch() -> None:
    for source in sources(*PACKAGE_FOLDERS):
        if not any(within(source.name, part) for part in MAY_IMPORT_TORCH):
            for name in source.imports():
                assert not within(name, "torch"), f"{source.shown} imports {name}"


def test_nothing_needs_transformers() -> None:
    for source in sources(*PACKAGE_FOLDERS):
        for name in source.imports():
            assert not within(name, "transformers"), f"{source.shown} imports {name}"


def test_only_settings_reads_the_environment() -> None:
    for source in sources(*PACKAGE_FOLDERS):
        if source.shown == SETTINGS:
            continue
        reads = {dotted(node) for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)}
        assert not reads & {"os.environ", "os.environb", "os.getenv"}, source.shown
        assert not {*source.imports()} & {"os.environ", "os.environb", "os.getenv"}, source.shown


@pytest.mark.parametrize("process", NOT_LOADED)
def test_a_process_loads_no_more_than_it_may(process: str) -> None:
    """Imports every module of a process in a fresh interpreter and asks what came with them."""
    names = [each.name for each in sources("client", "services") if within(each.name, process)]
    assert names
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module('triptych.' + name)\n"
        "print(*sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPO / "tests",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    for banned in NOT_LOADED[process]:
        assert not [name for name in loaded if within(name, banned)], f"{process} loads {banned}"
