"""Runs each test file of this folder in a process of its own, under Triton's interpreter.

Triton reads TRITON_INTERPRET while it is imported, and other tests of a common run may have
imported it without. So a file is collected here as one test that runs the file in a child process;
there, the variable being set, its tests are collected as usual. To run some of them by hand:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/triton/test_x.py -k y

On a GPU the same tests run compiled, their tensors made there by default (tests/gpu/test_kernels.py
sets the variable): TRITON_TESTS_ON=cuda python -m pytest tests/kernels/triton/test_x.py
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SWITCH = "TRITON_INTERPRET"
INTERPRETED = os.environ.get(SWITCH) == "1"  # noqa: TID251 - Triton has no other switch
DEVICE = os.environ.get("TRITON_TESTS_ON")  # noqa: TID251 - as the other one

if INTERPRETED:
    from interpreted_bfloat16 import install

    install()


class Failed(Exception):
    """A child's report."""


class InterpretedItem(pytest.Item):
    """All tests of a file, in a child process."""

    def runtest(self) -> None:
        """Run them."""
        child = subprocess.run(
            [
                "env", f"{SWITCH}=1", sys.executable, "-P", "-m", "pytest", "-q", "--no-header",
                "-p", "no:cacheprovider", *self._seed(), str(self.path),
            ],
            cwd=self.config.rootpath,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )  # fmt: skip
        if child.returncode:
            raise Failed(child.stdout)

    def _seed(self) -> list[str]:
        if not self.config.pluginmanager.hasplugin("randomly"):
            return ["-p", "no:randomly"]
        return ["-p", "randomly", f"--randomly-seed={self.config.getoption('randomly_seed')}"]

    def repr_failure(
        self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None
    ) -> str:
        """What the child wrote."""
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Where, and what it is called."""
        return self.path, 0, f"{self.path.name} under Triton's interpreter"


class InterpretedFile(pytest.File):
    """A test file, as one item."""

    def collect(self) -> Iterator[pytest.Item]:
        """That item."""
        yield InterpretedItem.from_parent(self, name="interpreted")


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> InterpretedFile | None:
    """A test file of this folder becomes one item, or its tests where they can run."""
    return None if INTERPRETED or DEVICE else InterpretedFile.from_parent(parent, path=module_path)


def pytest_configure(config: pytest.Config) -> None:
    """A GPU does not warn where numpy, under the interpreter, does: of infinities and NaN."""
    for module in ("interpreter", "core"):
        config.addinivalue_line("filterwarnings", f"ignore::RuntimeWarning:triton.*{module}")
    if DEVICE:
        import torch

        torch.set_default_device(DEVICE)
    elif INTERPRETED:
        _call_device_functions_faster()


def _call_device_functions_faster() -> None:
    """The interpreter replaces all of triton.language again at each call of a device function, half
    of its time; the kernel that calls has done so already."""
    from triton.runtime.interpreter import InterpretedFunction

    slowly = InterpretedFunction.__call__

    def call(self: InterpretedFunction, *args: object, **kwargs: object) -> object:
        if self.fn.__module__.startswith("triptych."):
            return self.rewrite()(*args, **kwargs)
        return slowly(self, *args, **kwargs)

    InterpretedFunction.__call__ = call


def pytest_report_header() -> str | None:
    """Say it, in a child."""
    return "Triton's interpreter" if INTERPRETED else DEVICE
