"""Structured output over gRPC: forms, answers that hold to them, and what they cost others."""

import json
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import psutil

from choices import Choices, joined
from engine import Engine, generate_request
from triptych.v1 import common_pb2

Asked = tuple[str | Sequence[int], dict[str, Any]]
"""A prompt and the fields of its SamplingParams."""


def form(**fields: Any) -> common_pb2.StructuredOutput:
    """A StructuredOutput of these fields."""
    return common_pb2.StructuredOutput(**fields)


def schema(value: object, **options: Any) -> common_pb2.StructuredOutput:
    """One that asks for JSON of a schema."""
    return form(json_schema=json.dumps(value), **options)


def one_of(*texts: str) -> common_pb2.StructuredOutput:
    """One that asks for one of these texts."""
    return form(choice=common_pb2.Choices(texts=texts))


def asked(
    engine: Engine, prompt: str | Sequence[int], wanted: common_pb2.StructuredOutput, **params: Any
) -> Choices:
    """The whole answer to one request."""
    return ask(engine, (prompt, {"structured_output": wanted, **params}))


def ask(engine: Engine, request: Asked) -> Choices:
    prompt, params = request
    message = generate_request(prompt, add_special_tokens=False, **params)
    return joined(engine.stub.Generate(message, timeout=60))


def ask_all(engine: Engine, requests: Sequence[Asked], at_once: int = 24) -> list[Choices]:
    """The answers to many, so many at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda each: ask(engine, each), requests))


def ask_through_a_death(engine: Engine, requests: Sequence[Asked]) -> list[Choices]:
    """The answers to requests whose executor is killed when all of them have been submitted.

    On a busy machine that may be too late: then again, and sooner.
    """
    for share in (1.0, 0.8, 0.6, 0.4, 0.2):
        pid = engine.pid("executor-0")
        answers, killed = _ask_and_kill(engine, requests, share)
        if killed:
            assert engine.pid("executor-0") != pid
            return answers
    raise AssertionError("it came too late each time")


def _ask_and_kill(
    engine: Engine, requests: Sequence[Asked], share: float
) -> tuple[list[Choices], bool]:
    """The answers, and whether the executor was killed when that share of all prompt tokens was
    behind it: only in the middle of more than an eighth of them."""
    before = engine.wait_idle().prompt_tokens_total
    wanted = before + share * sum(len(prompt) for prompt, _ in requests)
    with ThreadPoolExecutor(len(requests)) as pool:
        futures = [pool.submit(ask, engine, each) for each in requests]
        while engine.stats("scheduler").scheduler.prompt_tokens_total < wanted:
            time.sleep(0.002)
        killed = engine.kill_midway("executor-0", len(requests) // 8 + 1)
        return [future.result() for future in futures], killed


def said(answer: Choices) -> tuple[object, ...]:
    """All that must not depend on cache, company, guesses and deaths, logprobs to the last bit."""
    assert answer.usage is not None
    rows = {
        index: [
            (row.token_id, row.logprob, row.rank, [(t.token_id, t.logprob) for t in row.top])
            for row in found
        ]
        for index, found in answer.logprobs.items()
    }
    counts = answer.usage.prompt_tokens, answer.usage.completion_tokens
    return dict(answer.text), dict(answer.ids), rows, answer.finish, answer.score, counts


def check_json(text: str, value: object) -> object:
    """The document that a text is; that the schema allows it says a library of others."""
    document = json.loads(text)
    jsonschema.validate(document, value)
    return document


# ------------------------------------------------------------------ what it costs others


def figures(engine: Engine) -> dict[str, int]:
    """Everything that is lent, held or open, of an idle engine."""
    # HTTP opens a moment after the engine is ready, and holds a file more from then on.
    with urllib.request.urlopen(f"http://{engine.http_address}/health", timeout=30) as answer:
        assert answer.status == 200
    scheduler = engine.wait_idle()
    named = {
        "blocks_free": scheduler.blocks_free,
        "slots_free": scheduler.slots_free,
        "requests_tracked": scheduler.requests_tracked,
        "kv_unused_slots": scheduler.kv_unused_slots,
        "grammars_running": scheduler.grammars_running,
        "grammars_waiting": scheduler.grammars_waiting,
        "streams": engine.stats("tokenizer-0").tokenizer.streams,
    }
    for name in ("tokenizer-0", "scheduler", "executor-0"):
        process = engine.stats(name).process
        named[f"{name} open_files"] = process.open_files
        named[f"{name} ring_maps"] = process.ring_maps
    named["tokenizer-0 open_files"] -= 2 * len(checkers(engine))  # a pipe to each and one from it
    return named


def check_returned(engine: Engine, before: dict[str, int]) -> None:
    """Everything that was lent is back, and no file more is open than then."""
    deadline = time.monotonic() + 30
    while True:
        now = figures(engine)  # a connection may close a moment after its client has gone
        more = {name for name in now if name.endswith("open_files") and now[name] > before[name]}
        if not more:
            break
        assert time.monotonic() < deadline, (more, now, before)
        time.sleep(0.05)
    lent = {name for name in now if not name.endswith("open_files")}
    assert {name: now[name] for name in lent} == {name: before[name] for name in lent}


def checkers(engine: Engine) -> list[psutil.Process]:
    """The tokenizer's children, which check grammars: one, and one more for slow ones."""
    return psutil.Process(engine.pid("tokenizer-0")).children()


def slow_checkers(engine: Engine, check_seconds: float) -> list[psutil.Process]:
    """The one of them that has so many seconds for a check; none before something needs it."""
    found = []
    for child in checkers(engine):
        with suppress(psutil.NoSuchProcess):  # the other one, which was given up just now
            if child.cmdline()[3:4] == [str(check_seconds + 2.0)]:
                found.append(child)
    return found


def is_gone(process: psutil.Process) -> bool:
    """Whether it has ended, with all of its threads; its parent may not have looked yet."""
    if not process.is_running():
        return True
    threads = Path(f"/proc/{process.pid}/task")
    return process.status() == psutil.STATUS_ZOMBIE and len(list(threads.iterdir())) == 1


def resident(engine: Engine) -> dict[str, int]:
    """Bytes of memory of the processes that see grammars."""
    named = {
        name: int(psutil.Process(engine.pid(name)).memory_info().rss)
        for name in ("tokenizer-0", "scheduler")
    }
    return named | {"checkers": sum(child.memory_info().rss for child in checkers(engine))}


@dataclass
class Neighbour:
    """Streams the same greedy answer again and again. Times in seconds."""

    engine: Engine
    prompt: Sequence[int]
    tokens: int = 400
    longest_gap: float = 0.0
    answers: list[list[int]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _streaming: threading.Event = field(default_factory=threading.Event)

    def one(self) -> list[int]:
        """One answer; its longest wait between two messages counts."""
        request = generate_request(
            self.prompt, max_tokens=self.tokens, temperature=0.0, ignore_eos=True
        )
        token_ids: list[int] = []
        before: float | None = None
        for response in self.engine.stub.Generate(request, timeout=120):
            now = time.monotonic()
            if before is not None:
                self.longest_gap = max(self.longest_gap, now - before)
            before = now
            token_ids += response.token_ids
            self._streaming.set()
        return token_ids

    def _run(self) -> None:
        while not self._stop.is_set():
            self.answers.append(self.one())

    @contextmanager
    def streaming(self) -> Iterator["Neighbour"]:
        """Streams from before the body until after it, at least one whole answer."""
        self._streaming.clear()
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            assert self._streaming.wait(60)
            yield self
        finally:
            self._stop.set()
            thread.join(120)
        assert not thread.is_alive()


def distinct(answers: Iterable[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(each) for each in answers}
