"""The forms of an answer: response_format, structured_outputs and vLLM's older guided_* fields."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue
from pydantic_core import to_json

from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.openai_http.body import Body
from triptych.services.tokenizer.openai_http.sampling import Texts
from triptych.v1 import common_pb2

Schema = str | bool | dict[str, JsonValue]
"""A JSON Schema, as JSON or as its text."""


class NamedSchema(Body):
    """OpenAI's wrapping of a schema."""

    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = Field(default=None, description="the schema is kept either way")


class ResponseFormat(Body):
    """What the whole text is. A structural_tag keeps its parts beside `type`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None


def _as_text(value: object) -> object:
    return to_json(value).decode() if isinstance(value, dict) else value


class StructuredOutputs(Body):
    """vLLM's field: exactly one form, and options of the JSON forms."""

    model_config = ConfigDict(extra="forbid")

    json_: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Annotated[str, BeforeValidator(_as_text)] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class StructuredFields(Body):
    """Where a request can say what its answer looks like; one of them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None


def fill_structured(fields: StructuredFields, params: common_pb2.SamplingParams) -> str:
    """Set the form, if there is one. The field that it came from, "" without one.

    Raises InvalidRequest when there are several, or none where one is promised.
    """
    said = [name for name in StructuredFields.model_fields if _says(fields, name)]
    if not said:
        return ""
    if len(said) > 1:
        raise InvalidRequest(said[1], f"beside {said[0]}: an answer has one form")
    name = said[0]
    form = params.structured_output
    if fields.response_format is not None and name == "response_format":
        _response_format(fields.response_format, form)
    elif fields.structured_outputs is not None and name == "structured_outputs":
        _structured_outputs(fields.structured_outputs, form)
    else:
        _guided(fields, form)
    if fields.guided_whitespace_pattern is not None:
        form.whitespace_pattern = fields.guided_whitespace_pattern
    return name


def json_schema(schema: Schema, field: str) -> str:
    """Its text. Raises InvalidRequest for what JSON cannot hold."""
    if isinstance(schema, str):
        return schema
    try:
        return to_json(schema, inf_nan_mode="strings").decode()
    except ValueError as error:
        raise InvalidRequest(field, f"it is no JSON: {error}") from None


def _says(fields: StructuredFields, name: str) -> bool:
    value = getattr(fields, name)
    if isinstance(value, ResponseFormat):
        return value.type != "text"
    return value is not None and name != "guided_whitespace_pattern"


def _response_format(wished: ResponseFormat, form: common_pb2.StructuredOutput) -> None:
    match wished.type:
        case "json_object":
            form.json_object = True
        case "json_schema":
            schema = None if wished.json_schema is None else wished.json_schema.schema_
            if schema is None:
                raise InvalidRequest("response_format.json_schema.schema", "is missing")
            form.json_schema = json_schema(schema, "response_format.json_schema.schema")
        case _:
            form.structural_tag = wished.model_dump_json(exclude_none=True)


def _structured_outputs(wished: StructuredOutputs, form: common_pb2.StructuredOutput) -> None:
    forms = ("json_", "regex", "choice", "grammar", "json_object", "structural_tag")
    said = [name for name in forms if getattr(wished, name) not in (None, False)]
    if wished.json_ is False:
        said = ["json_", *said]
    if len(said) != 1:
        raise InvalidRequest("structured_outputs", f"{len(said)} forms, exactly 1 is needed")
    if wished.json_ is not None:
        form.json_schema = json_schema(wished.json_, "structured_outputs.json")
    elif wished.choice is not None:
        form.choice.texts.extend(wished.choice)
        form.choice.SetInParent()
    else:
        setattr(form, said[0], getattr(wished, said[0]))
    for name in ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
        value = getattr(wished, name)
        if value is not None:
            setattr(form, name, value)


def _guided(fields: StructuredFields, form: common_pb2.StructuredOutput) -> None:
    if fields.guided_json is not None:
        form.json_schema = json_schema(fields.guided_json, "guided_json")
    elif fields.guided_regex is not None:
        form.regex = fields.guided_regex
    elif fields.guided_grammar is not None:
        form.grammar = fields.guided_grammar
    else:
        form.choice.texts.extend(fields.guided_choice or ())
        form.choice.SetInParent()
