"""Where settings come from: the YAML file and the environment, each key with its origin."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from triptych.services.runtime.command_line import nearest
from triptych.services.runtime.lifecycle import StartupError

PREFIX = "TRIPTYCH_"


@dataclass(frozen=True, slots=True)
class Source:
    """A value as it was written, and where."""

    value: object
    where: str


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice, which YAML's own loader lets the later one win."""


def _unique_mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[object, object]:
    mapping: dict[object, object] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.MarkedYAMLError(
                problem=f"key {key!r} is not text", problem_mark=node.start_mark
            )
        if key in mapping:
            raise yaml.MarkedYAMLError(
                problem=f"key {key!r} stands twice", problem_mark=key_node.start_mark
            )
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def from_file(path: Path, known: Collection[str]) -> dict[str, Source]:
    """Read a flat YAML mapping. Raises StartupError for a file or a key that is not right."""
    try:
        with path.open(encoding="utf-8") as file:
            content = yaml.load(file, _StrictLoader)
    except OSError as error:
        raise StartupError(f"settings file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartupError(f"settings file {path}: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise StartupError(f"settings file {path} must hold `key: value` lines")
    for key in content:
        if key not in known:
            raise StartupError(f"settings file {path}: unknown key {key!r}{nearest(key, known)}")
    return {key: Source(value, str(path)) for key, value in content.items() if value is not None}


def from_environment(environ: Mapping[str, str], known: Collection[str]) -> dict[str, Source]:
    """Take the TRIPTYCH_ variables. Raises StartupError for one that no process knows."""
    sources: dict[str, Source] = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX):
            continue
        key = variable.removeprefix(PREFIX).lower()
        if variable != PREFIX + key.upper() or key not in {*known, "config"}:
            hint = nearest(key, known, lambda name: PREFIX + name.upper())
            raise StartupError(f"unknown environment variable {variable}{hint}")
        sources[key] = Source(value, variable)
    return sources
