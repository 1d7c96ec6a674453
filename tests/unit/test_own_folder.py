"""Folders of single commands: removed by them, or by the next one when they were killed."""

import os
import tempfile
import time
from pathlib import Path

import pytest

from triptych.services.cli.own_folder import own_folder
from triptych.services.runtime.run_dir import RunDir


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def made_long_ago(path: Path, lock: bool = True) -> Path:
    path.mkdir(mode=0o700)
    if lock:
        (path / "owner.lock").touch()
    (path / "scheduler.log").write_text("left")
    os.utime(path, (time.time() - 3600,) * 2)
    return path


def test_it_is_private_and_goes_with_the_command(temporary: Path) -> None:
    with own_folder("triptych-x-") as folder:
        assert folder.path.parent == temporary
        assert folder.path.stat().st_mode & 0o777 == 0o700
        (folder.path / "more").mkdir()
    assert list(temporary.iterdir()) == []


def test_what_a_killed_command_left_is_removed(temporary: Path) -> None:
    left = made_long_ago(temporary / "triptych-x-left")
    with own_folder("triptych-x-"):
        assert not left.exists()


def test_what_another_command_uses_stays(temporary: Path) -> None:
    with own_folder("triptych-x-") as first:
        os.utime(first.path, (time.time() - 3600,) * 2)
        with own_folder("triptych-x-"):
            assert first.path.exists()
        assert RunDir(first.path).held("owner")


def test_what_is_young_or_of_another_kind_stays(temporary: Path) -> None:
    young = temporary / "triptych-x-young"
    young.mkdir()
    (young / "owner.lock").touch()
    kept = [
        young,
        made_long_ago(temporary / "triptych-x-other", lock=False),
        made_long_ago(temporary / "triptych-y-left"),
    ]
    (temporary / "triptych-x-link").symlink_to(kept[2])
    (temporary / "triptych-x-file").touch()
    with own_folder("triptych-x-"):
        assert all(path.exists() for path in kept)
        assert (temporary / "triptych-x-link").is_symlink()
