"""What a client of `make chaos` makes of what comes: pieces of either door into one `Heard`."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import grpc

from triptych.v1 import common_pb2, inference_pb2

sys.path.insert(0, str(Path(__file__).parent))
from chaos_ledger import CANCELLED, CONNECTION, DEADLINE, SLOW, UNAVAILABLE, Behaviour, Heard
from chaos_requests import Ask

_HTTP_NAMES = {"slow_reader": SLOW, "unavailable": UNAVAILABLE, "deadline_passed": DEADLINE}
_SLOW_SECONDS = 8.0
_UNTOLD_SECONDS = 2.5
"""In which those who hear nothing before the end have most likely had a token too."""

Piece = inference_pb2.GenerateResponse | inference_pb2.ChatResponse


@dataclass(frozen=True, slots=True)
class Plan:
    """How a client behaves: leaves after so many `tokens` (or, without a stream, `seconds`), waits
    `seconds` between two reads, or sets a deadline of `seconds`."""

    behaviour: Behaviour = Behaviour.PLAIN
    tokens: int = 0
    seconds: float = 0.0

    def leaves(self, heard: Heard) -> bool:
        """Whether it has had what it waited for."""
        return self.behaviour is Behaviour.CANCELS and heard.tokens >= self.tokens


@dataclass(slots=True)
class Pulse:
    """When any token last came to anybody, and who waits for one."""

    when: float = 0.0
    open: "set[Reader]" = field(default_factory=set)

    def calm(self, since: float) -> bool:
        """Whether tokens have come since, to all who were there then as far as one can know."""
        return self.when > since and all(each.has_moved(since) for each in self.open)


@dataclass(slots=True, eq=False)
class Reader:
    """Takes the pieces of one request, at its own speed."""

    ask: Ask
    plan: Plan
    heard: Heard
    pulse: Pulse
    slept: float = 0.0

    @property
    def prompt(self) -> bool:
        """Whether its tokens come as they are drawn, and are read as they come."""
        held = self.ask.door == "http" or {"beam", "best_of"} & self.ask.fields.keys()
        return not held and self.plan.behaviour is not Behaviour.SLOW

    def has_moved(self, since: float) -> bool:
        """Whether a token came after `since`, or should have for one that is not told."""
        if self.heard.sent > since:
            return True
        if not self.prompt:
            return time.perf_counter() > since + _UNTOLD_SECONDS
        times = self.heard.arrivals
        return bool(times and times[-1][0] > since)

    async def take(self, piece: Piece) -> None:
        """One response of gRPC."""
        heard = self.heard
        choice = heard.choice(piece.index)
        choice.text += piece.text
        choice.token_ids += piece.token_ids
        choice.logprobs += [_logprob(each) for each in piece.logprobs]
        heard.prompt_logprobs += [_logprob(each) for each in piece.prompt_logprobs]
        if piece.token_ids:
            self.arrived()
        if piece.finish_reason:
            choice.ends += 1
            choice.finish = _finish(piece)
        if piece.HasField("usage"):
            heard.usage = f"{piece.usage.prompt_tokens}+{piece.usage.completion_tokens}"
        await self.rest()

    def arrived(self) -> None:
        """Tokens came."""
        self.pulse.when = time.perf_counter()
        self.heard.arrivals.append((self.pulse.when, self.heard.tokens))

    async def rest(self) -> None:
        """A slow reader's pause."""
        if self.plan.behaviour is Behaviour.SLOW and self.slept < _SLOW_SECONDS:
            self.slept += self.plan.seconds
            await asyncio.sleep(self.plan.seconds)

    def end(self, error: str = "", message: str = "") -> None:
        """It is over; only the first end counts."""
        if not self.heard.ended:
            self.heard.ended, self.heard.error, self.heard.message = True, error, message
            self.heard.over = time.perf_counter()


async def take_data(data: str, reader: Reader) -> None:
    if data == "[DONE]":
        reader.end()
        return
    event = json.loads(data)
    if "error" in event:
        reader.end(*http_error(event["error"]))
        return
    take_json(event, reader)
    await reader.rest()


def take_json(answer: dict[str, list[dict[str, object]]], reader: Reader) -> None:
    """A chunk of a stream, or a whole answer."""
    heard = reader.heard
    before = heard.tokens
    for each in answer["choices"]:
        choice = heard.choice(cast(int, each["index"]))
        turn = cast(dict[str, str], each.get("delta") or each.get("message") or each)
        choice.text += turn.get("content") or turn.get("text") or ""
        choice.token_ids += cast(list[int], each.get("token_ids") or [])
        choice.logprobs += _http_logprobs(cast(dict[str, list[object]] | None, each["logprobs"]))
        if each.get("finish_reason"):
            choice.ends += 1
            choice.finish = f"{each['finish_reason']} {each.get('stop_reason')}"
    if usage := cast(dict[str, int] | None, answer.get("usage")):
        heard.usage = f"{usage['prompt_tokens']}+{usage['completion_tokens']}"
    if heard.tokens > before:
        reader.arrived()


def _http_logprobs(shown: dict[str, list[object]] | None) -> list[str]:
    """A text a token, of a chat's rows or a completion's columns."""
    if shown is None:
        return []
    if (rows := shown.get("content")) is not None:
        return [json.dumps(row) for row in rows]
    columns = [column for column in shown.values() if column]
    return [json.dumps(row) for row in zip(*columns, strict=True)]


def http_error(error: dict[str, object]) -> tuple[str, str]:
    code = str(error["code"])
    return _HTTP_NAMES.get(code, code), str(error["message"])


async def take_events(response: object, asks: Sequence[Ask], readers: Sequence[Reader]) -> bool:
    """Of a Session's response; False at its end."""
    if not isinstance(response, inference_pb2.SessionResponse):
        return False
    for event in response.events:
        await _take_event(event, readers[event.id], asks[event.id])
    return True


async def _take_event(event: inference_pb2.SessionEvent, reader: Reader, ask: Ask) -> None:
    match event.WhichOneof("event"):
        case "error":
            code = grpc_code(event.error.code)
            slow = "SLOW_READER" in event.error.status.decode("latin-1")
            reader.end(SLOW if slow else code, event.error.message)
        case "output":
            await _take_piece(event.output, reader, ask)
        case "chat":
            await _take_piece(event.chat, reader, ask)


async def _take_piece(piece: Piece, reader: Reader, ask: Ask) -> None:
    if piece.finish_reason == common_pb2.FINISH_REASON_ABORT:
        reader.end(CANCELLED)
        return
    await reader.take(piece)
    if whole(ask, reader.heard):
        reader.end()


def whole(ask: Ask, heard: Heard) -> bool:
    """Whether every choice has ended."""
    return len(heard.choices) == ask.choices and all(one.ends for one in heard.choices.values())


def grpc_code(number: int) -> str:
    """The name of a google.rpc.Code."""
    return next(each.name for each in grpc.StatusCode if each.value[0] == number)


def rpc_error(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    """Name and message; CONNECTION where no server said it."""
    details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
    message = error.details() or ""
    if details is None and error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN):
        return CONNECTION, f"{error.code().name}: {message}"
    if details is not None and b"SLOW_READER" in bytes(details):
        return SLOW, message
    return error.code().name, message


def _finish(piece: Piece) -> str:
    reason = common_pb2.FinishReason.Name(piece.finish_reason)
    which = piece.WhichOneof("stop_reason")
    stop = f" {getattr(piece, which)!r}" if which else ""
    return f"{reason}{stop}" + (f" score {piece.score!r}" if piece.HasField("score") else "")


def _logprob(one: common_pb2.TokenLogprob) -> str:
    top = ",".join(f"{each.token_id}:{each.logprob!r}" for each in one.top)
    return f"{one.token_id}:{one.logprob!r}#{one.rank}[{top}]"
