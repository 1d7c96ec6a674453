"""constraints.txt pins every direct dependency of pyproject.toml, within its range."""

import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from source_tree import REPO


def direct() -> dict[str, Requirement]:
    facts = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
    lines = [
        *facts["build-system"]["requires"],
        *facts["project"]["dependencies"],
        *facts["project"]["optional-dependencies"]["dev"],  # "cuda": torch names its triton itself
    ]
    return {canonicalize_name(each.name): each for each in map(Requirement, lines)}


def pins() -> dict[str, str]:
    text = (REPO / "constraints.txt").read_text(encoding="utf-8")
    found = re.findall(r"^([\w.-]+)==(\S+)$", text, flags=re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    pinned = pins()
    assert sorted(direct().keys() - pinned.keys()) == []
    wrong = [
        f"{name} {pinned[name]} is not {each.specifier}"
        for name, each in direct().items()
        if not each.specifier.contains(pinned[name], prereleases=True)
    ]
    assert wrong == []
