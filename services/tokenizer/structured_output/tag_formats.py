"""The formats of a structural tag as rules of one Lark grammar.

Every format is written together with what must follow it, since that is where free text and regular
expressions end: `then` is that text, "" where the whole text ends, None where it is not fixed.
"""

from collections.abc import Mapping
from typing import Final

from triptych.services.tokenizer.structured_output.json_schema import JsonText, compiled_schema
from triptych.services.tokenizer.structured_output.lark import checked_lark
from triptych.services.tokenizer.structured_output.llguidance_text import (
    lark_literal,
    lark_part,
    schema_part,
)
from triptych.services.tokenizer.structured_output.refusal import Pointer, Refused, shown
from triptych.services.tokenizer.structured_output.regex import lark_regex
from triptych.services.tokenizer.structured_output.strict_json import Json
from triptych.services.tokenizer.structured_output.tag_fields import Fields

MAX_FORMATS = 2048

_ANY = "/(?s:.*)/"
_FIELDS: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "const_string": (("value",), ()),
    "json_schema": (("json_schema",), ()),
    "regex": (("pattern",), ()),
    "grammar": (("grammar",), ()),
    "any_text": ((), ("excludes", "excluded_str")),
    "sequence": (("elements",), ()),
    "or": (("elements",), ()),
    "tag": (("begin", "content", "end"), ()),
    "triggered_tags": (("triggers", "tags"), ("at_least_one", "stop_after_first")),
    "tags_with_separator": (("tags", "separator"), ("at_least_one", "stop_after_first")),
}
"""The fields of each format: those that it needs, and those that it may have."""


class TagFormats:
    """Rules and side grammars of one structural tag, as they are found."""

    def __init__(self, json_text: JsonText) -> None:
        self._json_text = json_text
        self.rules: list[str] = []
        """`name: expression` each."""
        self.parts: list[Json] = []
        """Grammars that the rules refer to."""
        self._formats = 0

    def whole(self, value: Json, pointer: Pointer) -> str:
        """The expression of a format that is the whole text. Raises Refused."""
        return self._format(value, pointer, "")

    def _format(self, value: Json, pointer: Pointer, then: str | None) -> str:
        """The expression of a format and of the text that follows it."""
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in _FIELDS:
            raise Refused(
                f"format {shown(repr(kind))} at {pointer} is not supported;"
                f" {', '.join(_FIELDS)} are"
            )
        self._formats += 1
        if self._formats > MAX_FORMATS:
            raise Refused(f"more than {MAX_FORMATS} formats")
        needed, others = _FIELDS[kind]
        fields = Fields(value, pointer, needed=needed, others=("type", *others))
        match kind:
            case "any_text":
                written = self._any_text(fields, pointer, then)
            case "sequence":
                written = self._sequence(fields, pointer, then)
            case "or":
                written = self._or(fields, pointer, then)
            case "tag":
                written = self._tag(value, pointer, then)
            case "triggered_tags":
                written = self._triggered(fields, pointer, then)
            case "tags_with_separator":
                written = f"{self._separated(fields, pointer)} {_literal(then)}"
            case "regex":
                written = self._regex(fields, pointer, then)
            case _:
                written = f"{self._simple(kind, fields, pointer)} {_literal(then)}"
        return written

    # ------------------------------------------------------------------------------------- leaves

    def _simple(self, kind: str, fields: Fields, pointer: Pointer) -> str:
        if kind == "const_string":
            return _literal(fields.text("value", empty=True))
        name = f"part_{len(self.parts)}"
        self.parts.append(None)  # the place is taken, also by what the part brings along
        place = pointer.down(kind)
        try:
            if kind == "json_schema":
                compiled = compiled_schema(fields.value("json_schema"), self._json_text)
                part = schema_part(name, compiled)
            else:
                text = fields.value("grammar")
                if not isinstance(text, str):
                    raise Refused("it must be a string")
                part = lark_part(name, checked_lark(text, self._json_text))
        except Refused as refused:
            raise Refused(f"{place}: {refused}") from refused
        self.parts[int(name.removeprefix("part_"))] = part
        return f"@{name}"

    def _regex(self, fields: Fields, pointer: Pointer, then: str | None) -> str:
        pattern = fields.value("pattern")
        if not isinstance(pattern, str):
            raise Refused(f"{pointer.down('pattern')} must be a string")
        try:
            expression = lark_regex(pattern)
        except Refused as refused:
            raise Refused(f"{pointer.down('pattern')}: {refused}") from refused
        # With what follows, one terminal: else it would take that in as its own.
        return self._terminal(f"{expression} {_literal(then)}")

    def _any_text(self, fields: Fields, pointer: Pointer, then: str | None) -> str:
        if "excludes" in fields and "excluded_str" in fields:
            raise Refused(f"excluded_str at {pointer} beside excludes, which means the same")
        excluded: list[str] = []
        for name in ("excludes", "excluded_str"):
            excluded += fields.texts(name) if name in fields else []
        return self._free_text(self._text_without(excluded), pointer, then)

    def _free_text(self, terminal: str, pointer: Pointer, then: str | None) -> str:
        if then is None:
            raise Refused(f"free text at {pointer} must be last, or a fixed text must follow it")
        if not then:
            return terminal
        return self._rule(f"{terminal} {_literal(then)}", "[lazy]")

    def _text_without(self, excluded: list[str]) -> str:
        without = "".join(f" & ~({_ANY} {_literal(each)} {_ANY})" for each in excluded)
        return self._terminal(_ANY + without)

    # ----------------------------------------------------------------------------------- compounds

    def _sequence(self, fields: Fields, pointer: Pointer, then: str | None) -> str:
        elements = fields.array("elements")
        places = [pointer.down("elements", index) for index in range(len(elements))]
        written: list[str] = []
        opened = False  # whether the element's opening has been written with the one before
        for index, element in enumerate(elements):
            last = index + 1 == len(elements)
            follows = then if last else _opening(elements[index + 1])
            written.append(self._element(element, places[index], follows, opened=opened))
            opened = not last and bool(follows)
        return f"({' '.join(written)})"

    def _element(self, element: Json, pointer: Pointer, then: str | None, *, opened: bool) -> str:
        if opened and isinstance(element, dict):
            element = _without_opening(element)
        return self._format(element, pointer, then)

    def _or(self, fields: Fields, pointer: Pointer, then: str | None) -> str:
        alternatives = [
            self._format(each, pointer.down("elements", index), then)
            for index, each in enumerate(fields.array("elements"))
        ]
        return f"({' | '.join(alternatives)})"

    def _tag(self, value: Json, pointer: Pointer, then: str | None, skip: int = 0) -> str:
        """`skip`: characters of its beginning that are written already."""
        fields = Fields(value, pointer, needed=_FIELDS["tag"][0], others=("type",))
        begin, end = fields.text("begin", empty=True), fields.text("end", empty=True)
        follows = end + then if then is not None else end or None
        content = self._format(fields.value("content"), pointer.down("content"), follows)
        return f"({_literal(begin[skip:])} {content})"

    def _triggered(self, fields: Fields, pointer: Pointer, then: str | None) -> str:
        triggers = list(dict.fromkeys(fields.texts("triggers")))
        tags = fields.array("tags")
        at_least_one, only_one = fields.flag("at_least_one"), fields.flag("stop_after_first")
        placed = [(tag, pointer.down("tags", index)) for index, tag in enumerate(tags)]
        by_trigger: dict[str, list[tuple[Json, Pointer]]] = {each: [] for each in triggers}
        for tag, place in placed:
            by_trigger[_trigger_of(tag, triggers, place)].append((tag, place))
        after = then if only_one else None
        anywhere = [
            f"{self._rule(f'{_ANY} {lark_literal(trigger)}', '[lazy]')} "
            f"({' | '.join(self._tag(tag, at, after, len(trigger)) for tag, at in each)})"
            for trigger, each in by_trigger.items()
            if each
        ]
        called = f"({' | '.join(anywhere)})"
        if at_least_one:
            first = f"({' | '.join(self._tag(*each, after) for each in placed)})"
            if only_one:
                return first
        # Text in which no trigger stands: the trigger's lazy terminal would end it there.
        rest = self._free_text(self._terminal(_ANY), pointer, then)
        if at_least_one:
            return f"({first} {called}* {rest})"
        return f"({called} | {rest})" if only_one else f"({called}* {rest})"

    def _separated(self, fields: Fields, pointer: Pointer) -> str:
        separator = fields.text("separator", empty=True)
        tags = [
            self._tag(tag, pointer.down("tags", index), None)
            for index, tag in enumerate(fields.array("tags"))
        ]
        one = self._rule(" | ".join(tags))
        more = "" if fields.flag("stop_after_first") else f"({_literal(separator)} {one})*"
        return f"({one} {more})" if fields.flag("at_least_one") else f"({one} {more})?"

    # --------------------------------------------------------------------------------------- rules

    def _rule(self, expression: str, options: str = "") -> str:
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {expression}")
        return name

    def _terminal(self, expression: str) -> str:
        name = f"TEXT_{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name


def _literal(text: str | None) -> str:
    return lark_literal(text) if text else ""


def _opening(value: Json) -> str | None:
    """The fixed text that a format begins with; None where there is none."""
    if not isinstance(value, dict):
        return None
    begin = value.get({"const_string": "value", "tag": "begin"}.get(str(value.get("type")), ""))
    return begin if isinstance(begin, str) and begin else None


def _without_opening(value: Mapping[str, Json]) -> Json:
    return {**value, "value" if value["type"] == "const_string" else "begin": ""}


def _trigger_of(tag: Json, triggers: list[str], pointer: Pointer) -> str:
    begin = Fields(tag, pointer, needed=("begin", "content", "end"), others=("type",)).text("begin")
    matching = [trigger for trigger in triggers if begin.startswith(trigger)]
    if len(matching) != 1:
        raise Refused(
            f"begin {shown(repr(begin))} at {pointer} begins with {len(matching) or 'none'} of the"
            " triggers; it must be with exactly one"
        )
    return matching[0]
