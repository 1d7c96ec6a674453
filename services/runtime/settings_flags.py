"""The command line of a settings type: one flag per field, and a `--help` that teaches."""

import argparse
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from triptych.services.runtime.command_line import LineParser, flag_spelling
from triptych.services.runtime.settings_sources import PREFIX


def flag(
    group: str, *, unit: str = "", default: str = "", hidden: bool = False
) -> dict[str, JsonValue]:
    """What help says of a field: its group, its unit, and its default where that needs words."""
    return {"group": group, "unit": unit, "default": default, "hidden": hidden}


@dataclass(frozen=True, slots=True)
class _Help:
    """The `flag(...)` of a field, typed again."""

    group: str
    unit: str
    default: str
    hidden: bool

    @classmethod
    def of(cls, field: FieldInfo) -> "_Help":
        extra = field.json_schema_extra
        if not isinstance(extra, dict):
            raise AssertionError(f"a setting without flag(...): {field.description}")
        return cls(
            str(extra["group"]), str(extra["unit"]), str(extra["default"]), bool(extra["hidden"])
        )


def build_parser(
    settings_types: Sequence[type[BaseModel]], prog: str, description: str
) -> LineParser:
    """A parser of the union of the types' fields; a flag that is not given parses to None.

    Values stay text: the settings type checks them, as it checks those of the file.
    """
    parser = LineParser(
        prog=prog,
        description=description or None,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=100),
        usage=f"{prog} [--config FILE] [--flag VALUE ...]",
        epilog=f"Each key can also stand in the YAML file (max_num_seqs: 8) or the environment "
        f"({PREFIX}MAX_NUM_SEQS=8). Flags win over the environment, the environment over the file. "
        f"Sizes: 536870912, 512MiB, 2GB.",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of `key: value` lines")
    groups: dict[str, argparse._ArgumentGroup] = {}
    fields = {name: f for each in settings_types for name, f in each.model_fields.items()}
    for name, field in sorted(fields.items(), key=lambda item: _rank(_Help.of(item[1]).group)):
        group = _Help.of(field).group
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        _add_flag(groups[group], name, field)
    return parser


def _rank(group: str) -> int:
    return {"Model": 0, "Supervision": 2, "Process": 3}.get(group, 1)


def _add_flag(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    text = argparse.SUPPRESS if _Help.of(field).hidden else help_text(field).replace("%", "%%")
    if field.annotation is bool:
        group.add_argument(
            flag_spelling(name), dest=name, action=argparse.BooleanOptionalAction, help=text
        )
        return
    group.add_argument(
        flag_spelling(name),
        dest=name,
        metavar=_metavar(field),
        nargs="+" if typing.get_origin(field.annotation) is tuple else None,
        help=text,
    )


def help_text(field: FieldInfo) -> str:
    """Description, default, unit and bounds of a field in one line."""
    facts = []
    told = _Help.of(field)
    if told.unit:
        facts.append(told.unit)
    if bounds := _bounds(field):
        facts.append(bounds)
    if told.default:
        facts.append(f"default {told.default}")
    elif field.default is PydanticUndefined and field.default_factory is None:
        facts.append("required")
    elif field.default not in (None, (), PydanticUndefined):
        default = field.default
        facts.append(f"default {str(default).lower() if isinstance(default, bool) else default}")
    return f"{field.description} [{'; '.join(facts)}]" if facts else str(field.description)


def _bounds(field: FieldInfo) -> str:
    words = []
    for each in field.metadata:
        match each:
            case Ge(ge=bound):
                words.append(f"at least {bound}")
            case Gt(gt=bound):
                words.append(f"above {bound}")
            case Le(le=bound):
                words.append(f"at most {bound}")
            case Lt(lt=bound):
                words.append(f"below {bound}")
    return ", ".join(words)


def _metavar(field: FieldInfo) -> str:
    choices = _choices(field.annotation)
    if choices:
        return "{" + ",".join(choices) + "}"
    return {"bytes": "SIZE", "seconds": "SECONDS"}.get(_Help.of(field).unit, "VALUE")


def _choices(annotation: object) -> list[str]:
    if typing.get_origin(annotation) is typing.Literal:
        return [str(choice) for choice in typing.get_args(annotation)]
    if isinstance(annotation, types.UnionType):
        return [each for part in typing.get_args(annotation) for each in _choices(part)]
    return []
