"""What may stand between the parts of a JSON document."""

from triptych.services.tokenizer.structured_output.compilation import is_empty
from triptych.services.tokenizer.structured_output.json_schema import JsonText
from triptych.services.tokenizer.structured_output.refusal import Refused
from triptych.services.tokenizer.structured_output.regex import lark_regex
from triptych.v1 import common_pb2

MAX_WHITESPACE = 64
"""Characters in a row that a client's own pattern may match."""

_JSON_FORMS = frozenset({"json_schema", "json_object", "structural_tag"})


def json_text(raw: common_pb2.StructuredOutput) -> JsonText:
    """The client's wishes about JSON. Raises InvalidRequest."""
    form = raw.WhichOneof("form")
    for field, forms in (
        ("whitespace_pattern", _JSON_FORMS),
        ("disable_any_whitespace", _JSON_FORMS),
        ("disable_additional_properties", _JSON_FORMS - {"json_object"}),
    ):
        # The stub takes literals only; these are names of optional fields.
        wished = raw.HasField(field)  # type: ignore[arg-type]  # literals only in the stub
        if wished and form not in forms:
            raise Refused(f"beside {form} it says nothing").named(field)
    given = raw.HasField("whitespace_pattern")
    if given and raw.disable_any_whitespace:
        raise Refused("beside disable_any_whitespace it says nothing").named("whitespace_pattern")
    closed = raw.disable_additional_properties
    if raw.disable_any_whitespace:
        return JsonText(whitespace="", closed=closed)
    if not given:
        return JsonText(closed=closed)
    try:
        _check_pattern(raw.whitespace_pattern)
    except Refused as refused:
        raise refused.named("whitespace_pattern") from refused
    return JsonText(whitespace=raw.whitespace_pattern, closed=closed)


def _check_pattern(pattern: str) -> None:
    if not pattern:
        return
    terminal = lark_regex(pattern)
    # Asked of the language itself: no look at the pattern's letters could tell.
    if not is_empty(f"start: A\nA: {terminal} & ~/[ \\t\\n\\r]*/\n"):
        raise Refused("it matches what is no white space of JSON (blanks, \\t, \\n, \\r)")
    if not is_empty(f"start: A\nA: {terminal} & /(?s:.{{{MAX_WHITESPACE + 1},}})/\n"):
        raise Refused(
            f"it matches more than {MAX_WHITESPACE} characters: bound it, such as with {{0,16}}"
        )
