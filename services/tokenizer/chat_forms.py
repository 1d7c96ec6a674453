"""What the answer of a chat is held to: its choice of tools, or its own form behind a thought."""

from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.calling import Calling
from triptych.services.tokenizer.chat_output import answer_form, kept_schemas, tool_form
from triptych.services.tokenizer.structured import StructuredOutputs
from triptych.v1 import common_pb2

_OWN = "sampling_params.structured_output"


async def chat_grammar(
    raw: common_pb2.SamplingParams, calling: Calling, structured: StructuredOutputs
) -> str | None:
    """The grammar of a chat's answer; None where it is the one that the request itself asks for,
    or none. Raises InvalidRequest naming the tool's field, or what StructuredOutputs raises."""
    if calling.tools:
        return await _grammar_of_calls(raw, calling, structured)
    if calling.names.reasoning is None or not raw.HasField("structured_output"):
        return None
    form = answer_form(
        raw.structured_output,
        calling.names.reasoning,
        prompt_tail=calling.prompt_tail,
        continued=calling.continued,
    )
    try:
        return await structured.grammar_of(form)
    except InvalidRequest as error:
        raise InvalidRequest(_OWN, f"behind a thought, {error.description}") from error


async def _grammar_of_calls(
    raw: common_pb2.SamplingParams, calling: Calling, structured: StructuredOutputs
) -> str | None:
    assert calling.names.tools is not None, "there are no tools without a parser"
    form = tool_form(
        calling.names.tools,
        calling.tools,
        calling.choice,
        calling.parallel,
        reasoning_parser=calling.names.reasoning,
        prompt_tail=calling.prompt_tail,
        continued=calling.continued,
    )
    if form is None:
        return None
    if raw.HasField("beam"):
        raise InvalidRequest("tools", "beside beam: hypotheses are not masked by them")
    if raw.HasField("external_sampler"):
        raise InvalidRequest("tools", "beside external_sampler: its draws are not masked by them")
    try:
        return await structured.grammar_of(form)
    except InvalidRequest as error:
        await _blame(calling, structured)
        raise InvalidRequest("tools", error.description) from error


async def _blame(calling: Calling, structured: StructuredOutputs) -> None:
    """Raises InvalidRequest naming the tool whose schema cannot be kept, if one alone cannot."""
    for field, schema in kept_schemas(calling.tools, calling.choice):
        try:
            await structured.grammar_of(schema)
        except InvalidRequest as error:
            raise InvalidRequest(field, error.description) from error
