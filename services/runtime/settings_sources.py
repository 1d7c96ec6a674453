"""Where settings come from: the YAML file and the environment, each key with its origin."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from triptych.services.runtime.command_line import nearest
from triptych.services.runtime.lifecycle import StartupError

PREFIX = "TRIPTYCH_"


@dataclass(frozen=True, slots=True)
class Source:
    """A value as it was written, and where."""

    value: object
    where: str


def from_file(path: Path, known: Collection[str]) -> dict[str, Source]:
    """Read a flat YAML mapping. Raises StartupError for a file or a key that is not right."""
    # Here, because most starts have no such file and need not wait for the package.
    import yaml

    from triptych.services.runtime.strict_yaml import strict_yaml

    try:
        with path.open(encoding="utf-8") as file:
            content = strict_yaml(file)
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
