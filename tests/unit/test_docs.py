"""The documentation names files and settings that exist, and all that it should."""

import re
from pathlib import Path

import pytest

from source_tree import PACKAGE_FOLDERS, REPO
from triptych.services.cli.settings import ServeSettings
from triptych.services.executor.settings import ExecutorSettings
from triptych.services.runtime.settings import Settings
from triptych.services.scheduler.settings import SchedulerSettings
from triptych.services.tokenizer.settings import TokenizerSettings

PAGES = sorted(
    [
        *REPO.glob("*.md"),
        *(REPO / "docs").rglob("*.md"),
        *(REPO / folder / "README.md" for folder in ("bench", "deploy")),
        *(REPO / "examples").glob("*/README.md"),
    ]
)
FOLDERS = (*PACKAGE_FOLDERS, "deploy", "examples")
ALL_SETTINGS: tuple[type[Settings], ...] = (
    ServeSettings, TokenizerSettings, SchedulerSettings, ExecutorSettings,
)  # fmt: skip
_PATH = re.compile(
    r"`((?:protos|engine_core|kernels|services|tests|docs|bench|scripts|src|examples|client|deploy)/[\w./-]*)`"
)
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
_MODULE = re.compile(r"`(\w+\.py)`")
_TARGET = re.compile(r"(?:^|`)make ([a-z][a-z0-9-]*[a-z0-9])\b(?!-)", flags=re.MULTILINE)


def page_id(page: Path) -> str:
    return str(page.relative_to(REPO))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    generated = ("src/triptych/v1", "src/triptych/kserve")
    named = {name for name in _PATH.findall(text) if not name.startswith(generated)}
    assert sorted(name for name in named if not (REPO / name).exists()) == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_named_modules_exist(page: Path) -> None:
    named = set(_MODULE.findall(page.read_text(encoding="utf-8")))
    known = {path.name for folder in FOLDERS for path in (REPO / folder).rglob("*.py")}
    assert sorted(named - known) == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    links = _LINK.findall(page.read_text(encoding="utf-8"))
    assert sorted(link for link in links if not (page.parent / link).exists()) == []


def test_every_setting_is_documented_once() -> None:
    text = (REPO / "docs" / "operations.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)
    keys = {
        key
        for settings in ALL_SETTINGS
        for key, field in settings.model_fields.items()
        if not (isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("hidden"))
    }
    assert sorted(documented) == sorted(keys)


def test_every_make_target_that_a_page_names_exists() -> None:
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):.*## ", makefile, flags=re.MULTILINE))
    for page in PAGES:
        for named in _TARGET.findall(page.read_text(encoding="utf-8")):
            assert named in targets, f"{page_id(page)}: make {named}"
