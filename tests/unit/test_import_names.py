"""Our folders never shadow a package of the same bare name, and are reachable as `triptych.*` only.

Hugging Face ships a package called `kernels`, which transformers imports when it is there.
A folder without `__init__.py` loses to any real package, wherever it stands on sys.path.
"""

import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from source_tree import PACKAGE_FOLDERS, REPO

TOP_FOLDERS = (*PACKAGE_FOLDERS, "protos")


@pytest.mark.parametrize("name", TOP_FOLDERS)
def test_a_real_package_wins(name: str, tmp_path: Path) -> None:
    real = tmp_path / name / "__init__.py"
    real.parent.mkdir()
    real.touch()
    spec = PathFinder.find_spec(name, [str(REPO), str(tmp_path)])
    assert spec is not None
    assert spec.origin == str(real)


@pytest.mark.parametrize("name", TOP_FOLDERS)
def test_top_folders_are_no_packages(name: str) -> None:
    assert not (REPO / name / "__init__.py").exists()


@pytest.mark.parametrize("name", PACKAGE_FOLDERS)
def test_the_import_package_is_links(name: str) -> None:
    link = REPO / "src" / "triptych" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..", "..", name)


def test_bare_names_are_not_importable(tmp_path: Path) -> None:
    program = (
        "from importlib.util import find_spec\n"
        f"print([n for n in {TOP_FOLDERS!r} if (s := find_spec(n)) and s.origin is None])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
