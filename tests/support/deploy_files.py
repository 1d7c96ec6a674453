"""What deploy/, compose.yaml and the Dockerfile say, for tests."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from source_tree import REPO

COMPOSE = REPO / "compose.yaml"
KUBERNETES = REPO / "deploy" / "kubernetes"
SYSTEMD = REPO / "deploy" / "systemd"
DOCKERFILE = REPO / "Dockerfile"
_VARIABLE = re.compile(r"\$\{\w+:?-([^}]*)\}")


def compose() -> dict[str, Any]:
    """compose.yaml with the defaults of its variables."""
    text = _VARIABLE.sub(r"\1", COMPOSE.read_text(encoding="utf-8"))
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def kubernetes() -> Iterator[dict[str, Any]]:
    """Every object of deploy/kubernetes."""
    for path in sorted(KUBERNETES.glob("*.yaml")):
        yield from yaml.safe_load_all(path.read_text(encoding="utf-8"))


def kubernetes_object(kind: str) -> dict[str, Any]:
    """The one of its kind."""
    (found,) = [each for each in kubernetes() if each["kind"] == kind]
    return found


def unit_files() -> list[Path]:
    """The systemd units."""
    return sorted([*SYSTEMD.glob("*.service"), *SYSTEMD.glob("*.target")])
