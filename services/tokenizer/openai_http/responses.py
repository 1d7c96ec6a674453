"""/v1/responses: OpenAI's Responses API over ChatRequest. Stateless: nothing is stored.

Input items become chat messages: messages, earlier function calls, their outputs; reasoning items
go into the assistant's turn that follows them.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.openai_http.body import Body
from triptych.services.tokenizer.openai_http.messages import (
    Content,
    FunctionTool,
    NamedFunction,
    fill_choice,
    text_of,
    tool_of,
)
from triptych.services.tokenizer.openai_http.sampling import NAMES, put
from triptych.services.tokenizer.openai_http.structured import Schema, json_schema
from triptych.v1 import inference_pb2


class Item(Body):
    """A part of the input; `type` says which fields it has, without one it is a message."""

    type: str | None = None
    role: str | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None
    summary: Content | None = None


class TextFormat(Body):
    """What the whole text is."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Of the answer's text."""

    format: TextFormat | None = None


class FunctionChoice(NamedFunction):
    """The one function that must be called."""

    type: Literal["function"]


class Reasoning(Body):
    """For templates that know it."""

    effort: str | None = None


class ResponsesRequest(Body):
    """One turn, from all that was said before."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "background": "answers are not kept; wait for this one",
        "conversation": "nothing is stored here; send the whole input",
        "previous_response_id": "nothing is stored here; send the whole input",
        "prompt": "nothing is stored here; send the whole input",
    }

    model: str | None = None
    input: str | Annotated[list[Item], Field(fail_fast=True)]
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = Field(default=None, description="nothing is, whatever is said here")
    truncation: Literal["disabled", "auto"] | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None


_SAME = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
)  # fmt: skip


def request_of(
    fields: ResponsesRequest, label: str
) -> tuple[inference_pb2.ChatRequest, Mapping[str, str]]:
    """The ChatRequest, and what errors call its fields. Raises InvalidRequest."""
    request = inference_pb2.ChatRequest(
        model=fields.model or "", request_id=label, tenant=fields.user or ""
    )
    params = request.sampling_params
    for name in _SAME:
        put(params, name, getattr(fields, name))
    put(params, "max_tokens", fields.max_output_tokens, "max_output_tokens")
    wished = fields.text.format if fields.text is not None else None
    if wished is not None and wished.type != "text":
        if wished.type == "json_object":
            params.structured_output.json_object = True
        elif wished.schema_ is None:
            raise InvalidRequest("text.format.schema", "is missing")
        else:
            schema = json_schema(wished.schema_, "text.format.schema")
            params.structured_output.json_schema = schema
    if fields.instructions:
        request.messages.add(role="system", content=fields.instructions)
    if isinstance(fields.input, str):
        request.messages.add(role="user", content=fields.input)
    else:
        _add_items(fields.input, request)
    request.tools.extend(tool_of(each) for each in fields.tools or ())
    fill_choice(fields.tool_choice, request)
    put(request, "parallel_tool_calls", fields.parallel_tool_calls)
    request.chat_template_kwargs = _template_kwargs(fields)
    names = {
        **NAMES, "structured_output": "text.format", "max_tokens": "max_output_tokens",
        "messages": "input",
    }  # fmt: skip
    return request, names


def _add_items(items: Sequence[Item], request: inference_pb2.ChatRequest) -> None:
    thought = ""
    for index, item in enumerate(items):
        field = f"input[{index}]"
        match item.type or "message":
            case "message":
                if item.role is None:
                    raise InvalidRequest(f"{field}.role", "is missing")
                role = "system" if item.role == "developer" else item.role
                content = text_of(item.content, f"{field}.content")
                request.messages.add(role=role, content=content, reasoning=thought)
                thought = ""
            case "reasoning":
                thought = text_of(item.content or item.summary, f"{field}.content")
            case "function_call":
                _assistant(request, thought).tool_calls.add(
                    id=item.call_id or "", name=item.name or "", arguments=item.arguments or ""
                )
                thought = ""
            case "function_call_output":
                request.messages.add(
                    role="tool",
                    content=text_of(item.output, f"{field}.output"),
                    tool_call_id=item.call_id or "",
                )
            case other:
                raise InvalidRequest(f"{field}.type", f"{other!r:.40} is not supported")


def _assistant(request: inference_pb2.ChatRequest, thought: str) -> inference_pb2.ChatMessage:
    """The turn that a call belongs to: calls in a row, and the text before them, are one."""
    if request.messages and request.messages[-1].role == "assistant" and not thought:
        return request.messages[-1]
    return request.messages.add(role="assistant", reasoning=thought)


def _template_kwargs(fields: ResponsesRequest) -> str:
    from pydantic_core import to_json

    kwargs = dict(fields.chat_template_kwargs or {})
    if fields.reasoning is not None and fields.reasoning.effort is not None:
        kwargs.setdefault("reasoning_effort", fields.reasoning.effort)
    return to_json(kwargs, inf_nan_mode="strings").decode() if kwargs else ""
