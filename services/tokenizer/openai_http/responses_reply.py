"""The answer of /v1/responses: one object, or events that build it.

The output is a list of items: a reasoning item, a message, function calls; each appears in that
order of its first piece. In a stream, items are opened one after the other: a new kind closes the
one before.
"""

import uuid

from pydantic_core import to_json

from triptych.services.tokenizer.openai_http.logprobs import Json
from triptych.services.tokenizer.openai_http.responses import ResponsesRequest
from triptych.services.tokenizer.openai_http.sse import named_event
from triptych.services.tokenizer.openai_http.usage import UsageSum
from triptych.v1 import common_pb2, inference_pb2

_MESSAGE, _REASONING = "message", "reasoning"


class ResponsesReply:
    """Takes ChatResponses, gives the answer's bytes."""

    def __init__(self, fields: ResponsesRequest, identity: Json) -> None:
        """`identity`: id, created and model."""
        self._fields = fields
        self._stream = bool(fields.stream)
        self._identity = identity
        self._usage = UsageSum()
        self._items: list[_Item] = []
        self._finish = 0
        self._events: list[bytes] = []
        self._sequence = 0

    def add(self, _prompt: int, response: inference_pb2.ChatResponse) -> bytes:
        """Take the next response; the events that it makes."""
        self._usage.add(response.usage)
        self._finish = response.finish_reason or self._finish
        if self._stream and not self._sequence:
            for kind in ("created", "in_progress"):
                self._event(f"response.{kind}", response=self._response("in_progress"))
        if response.reasoning:
            self._item(_REASONING).text.append(response.reasoning)
            self._delta("response.reasoning_text.delta", response.reasoning)
        if response.text:
            self._item(_MESSAGE).text.append(response.text)
            self._delta("response.output_text.delta", response.text)
        for call in response.tool_calls:
            item = self._item(f"call {call.index}", call)
            item.text.append(call.arguments)
            if call.arguments:
                self._delta("response.function_call_arguments.delta", call.arguments)
        return self._taken()

    def end(self) -> bytes:
        """The whole answer, or the end of the stream."""
        if not any(item.kind != _REASONING for item in self._items):
            self._item(_MESSAGE)  # an answer without a word is one all the same
        self._close()
        cut = self._finish == common_pb2.FINISH_REASON_LENGTH
        status = "incomplete" if cut else "completed"
        response = self._response(status)
        if not self._stream:
            return to_json(response)
        self._event(f"response.{status}", response=response)
        return self._taken()

    def _item(self, kind: str, call: inference_pb2.ToolCallDelta | None = None) -> "_Item":
        if self._items and self._items[-1].kind == kind:
            return self._items[-1]
        for item in self._items:
            if item.kind == kind and not self._stream:
                return item
        self._close()
        item = _Item(kind, call)
        self._items.append(item)
        self._event(
            "response.output_item.added", output_index=len(self._items) - 1,
            item=item.as_json("in_progress", empty=True),
        )  # fmt: skip
        if call is None:
            self._event("response.content_part.added", **self._place(), part=item.part(""))
        return item

    def _close(self) -> None:
        """Of the last item: all that says it is whole."""
        if not self._items or self._items[-1].done:
            return
        item = self._items[-1]
        item.done = True
        place, text = self._place(), "".join(item.text)
        if item.call is not None:
            del place["content_index"]
            self._event("response.function_call_arguments.done", **place, arguments=text,
                        name=item.call.name)  # fmt: skip
        else:
            name = "output_text" if item.kind == _MESSAGE else "reasoning_text"
            extra: Json = {"logprobs": []} if item.kind == _MESSAGE else {}
            self._event(f"response.{name}.done", **place, text=text, **extra)
            self._event("response.content_part.done", **place, part=item.part(text))
        self._event(
            "response.output_item.done", output_index=len(self._items) - 1,
            item=item.as_json("completed"),
        )  # fmt: skip

    def _place(self) -> Json:
        return {
            "item_id": self._items[-1].id, "output_index": len(self._items) - 1,
            "content_index": 0,
        }  # fmt: skip

    def _delta(self, name: str, text: str) -> None:
        if self._stream:
            place = self._place()
            if self._items[-1].call is not None:
                del place["content_index"]
            extra: Json = {"logprobs": []} if name == "response.output_text.delta" else {}
            self._event(name, **place, delta=text, **extra)

    def _event(self, name: str, /, **data: object) -> None:
        if self._stream:
            data = {"type": name, "sequence_number": self._sequence, **data}
            self._events.append(named_event(name, data))
            self._sequence += 1

    def _taken(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events

    def _response(self, status: str) -> Json:
        fields = self._fields
        wished = fields.text.format if fields.text is not None else None
        shown: Json = {"type": "text"}
        if wished is not None:
            shown = wished.model_dump(exclude_none=True, by_alias=True)
        cut = status == "incomplete"
        choice = fields.tool_choice
        return {
            "id": self._identity["id"],
            "object": "response",
            "created_at": self._identity["created"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "model": self._identity["model"],
            "output": [item.as_json("completed") for item in self._items if item.done],
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": fields.reasoning.effort if fields.reasoning else None, "summary": None
            },
            "store": False,
            "temperature": 1.0 if fields.temperature is None else fields.temperature,
            "text": {"format": shown},
            "tool_choice": choice if isinstance(choice, str | None) else choice.model_dump(),
            "tools": [each.model_dump(exclude_none=True) for each in fields.tools or ()],
            "top_p": 1.0 if fields.top_p is None else fields.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._usage_json(),
            "user": fields.user,
            "metadata": fields.metadata or {},
        }  # fmt: skip

    def _usage_json(self) -> Json:
        usage = self._usage
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.completion,
        }


class _Item:
    """An item of the output, as it grows."""

    def __init__(self, kind: str, call: inference_pb2.ToolCallDelta | None) -> None:
        self.kind = kind
        self.call = call
        self.text: list[str] = []
        self.done = False
        prefix = {_MESSAGE: "msg", _REASONING: "rs"}.get(kind, "fc")
        self.id = f"{prefix}_{uuid.uuid4().hex}"

    def part(self, text: str) -> Json:
        """The one part of a message or a thought."""
        if self.kind == _REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def as_json(self, status: str, *, empty: bool = False) -> Json:
        text = "" if empty else "".join(self.text)
        if self.call is not None:
            return {
                "id": self.id, "type": "function_call", "status": status,
                "call_id": self.call.id, "name": self.call.name, "arguments": text,
            }  # fmt: skip
        content = [] if empty else [self.part(text)]
        item: Json = {"id": self.id, "type": self.kind, "status": status, "content": content}
        if self.kind == _MESSAGE:
            return item | {"role": "assistant"}
        return item | {"summary": []}
