"""Schedulers that die between any two messages: every client sees what it would have seen.

The real client, streams and detokenizers; the connection and the scheduler behind it are scripted,
and the test decides after how many messages a scheduler dies and what it takes with it.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from choices import Choices, values
from fake_scheduler import FakeScheduler
from scripted_models import write_m2_random_llama, write_t1_tokenizer
from tokenizer_bench import request_of
from triptych.services.runtime.model_files import resolve_model
from triptych.services.tokenizer.generation import Generation, GenerationRules, Running
from triptych.services.tokenizer.grammar_checker import GrammarChecker
from triptych.services.tokenizer.grammar_process import CheckLimits
from triptych.services.tokenizer.scheduler_client import SchedulerClient
from triptych.services.tokenizer.scheduler_connection import (
    Beats,
    ConnectionOwner,
    SchedulerConnection,
    SchedulerFacts,
)
from triptych.services.tokenizer.stats import Counters
from triptych.services.tokenizer.structured import StructuredOutputs
from triptych.services.tokenizer.tokenizer import Tokenizer, load_tokenizer
from triptych.v1 import inference_pb2, stage_pb2

FACTS = SchedulerFacts(1, "llama", 320, 4096, 4096)
TEXT = "ab🙂 héllo END ça va🙂🙂 END"
PEER = b"tokenizer"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("model")
    write_t1_tokenizer(folder, ["DEF", "HI"])
    write_m2_random_llama(folder)
    return load_tokenizer(resolve_model(str(folder)))


class Socket:
    """What a scheduler has sent."""

    def __init__(self) -> None:
        self.frames: list[stage_pb2.StepOutputs] = []

    def send_multipart(self, parts: list[bytes]) -> None:
        self.frames.append(stage_pb2.TokenizerReply.FromString(parts[1]).outputs)


def script(submit: stage_pb2.Submit, choice: int) -> Sequence[int]:
    """Another text for every prompt and choice, all of characters of several bytes."""
    turn = (7 * choice + sum(submit.prompt_token_ids)) % 11
    return list(((TEXT[turn:] + TEXT) * 4).encode())


def new_scheduler(burst: int) -> FakeScheduler:
    return FakeScheduler(
        "", lambda _: [], choice_script=script, burst=burst, prompt_rows=2, split_beams=True
    )


class Connection:
    """A SchedulerConnection without sockets."""

    def __init__(self) -> None:
        self.beats = Beats()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.welcomed = self.linked = False
        self.scheduler: FakeScheduler | None = None
        self.submits: list[stage_pb2.Submit] = []
        self.refusing = 0
        self._clock = 0.0

    def now(self) -> float:
        return self._clock

    def start(self, owner: ConnectionOwner) -> None:
        self.owner = owner

    def guarded(self, callback: Callable[[], None]) -> None:
        callback()

    def send(self, message: stage_pb2.TokenizerMessage) -> bool:
        assert self.scheduler is not None, "nothing is sent while there is none"
        if self.refusing and message.submit.accepted:
            self.refusing -= 1
            return False
        if message.HasField("submit"):
            self.submits.append(message.submit)
        self.scheduler._message(cast("zmq.Socket[bytes]", Socket()), PEER, message)
        return True

    def join(self, scheduler: FakeScheduler) -> None:
        scheduler._peers[PEER] = 1
        self.scheduler, self.welcomed = scheduler, True
        self.owner.welcomed(FACTS)

    def lose(self) -> None:
        self.scheduler, self.welcomed = None, False
        self.owner.lost("it was killed")


@dataclass
class Client:
    """A request, when it is made, and what its client has seen."""

    request: inference_pb2.GenerateRequest
    at: int
    running: Running | None = None
    seen: Choices = field(default_factory=Choices)

    @property
    def done(self) -> bool:
        return self.seen.usage is not None

    def read(self) -> None:
        while self.running is not None and (piece := self.running.stream.take()) is not None:
            self.seen.add(self.running.response(inference_pb2.GenerateResponse, piece))

    def answer(self) -> dict[str, object]:
        usage = self.seen.usage
        assert usage is not None
        return {
            "text": dict(self.seen.text),
            "ids": dict(self.seen.ids),
            "logprobs": {index: values(rows) for index, rows in self.seen.logprobs.items() if rows},
            "prompt_logprobs": values(self.seen.prompt_logprobs),
            "finish": self.seen.finish,
            "score": self.seen.score,
            "tokens": (usage.prompt_tokens, usage.completion_tokens),
        }


def generation_of(tokenizer: Tokenizer, connection: Connection) -> tuple[Generation, Any]:
    counters = Counters()
    client = SchedulerClient(cast(SchedulerConnection, connection), counters, lambda: None)
    structured = StructuredOutputs(
        tokenizer, GrammarChecker(CheckLimits(1.0, 1 << 30)), frozenset()
    )
    rules = GenerationRules(seed=1, max_unread_tokens=4096, max_logprobs=20)
    client.start()
    return Generation(tokenizer, ("m",), client, structured, counters, rules), client


async def play(
    tokenizer: Tokenizer, clients: list[Client], deaths: Sequence[int], burst: int, refusing: int
) -> list[stage_pb2.Submit]:
    """Run all requests to their ends. Scheduler i dies when deaths[i] messages have come of it."""
    connection = Connection()
    generation, owner = generation_of(tokenizer, connection)
    connection.join(new_scheduler(burst))
    lives, heard = iter(deaths), 0
    most, sent = next(lives, None), Socket()
    for turn in range(2000):
        dies = False
        for client in clients:
            if client.running is None and client.at <= turn:
                client.running = generation.start(await generation.generate(client.request))
        await asyncio.sleep(0 if sent.frames else 0.002)
        sent = Socket()
        assert connection.scheduler is not None
        connection.scheduler._step(cast("zmq.Socket[bytes]", sent))
        for frame in sent.frames:
            if heard == most:
                dies = True
                break
            heard += 1
            owner.outputs(frame)
            owner.drained(0.0)
        for client in clients:
            client.read()
        if all(client.done for client in clients):
            await asyncio.sleep(0)
            assert owner.streams == 0
            return connection.submits
        if dies:
            connection.lose()
            most, heard = next(lives, None), 0
            for client in clients:  # some come while there is none
                if client.running is None and client.at <= turn + 2:
                    client.running = generation.start(await generation.generate(client.request))
            await asyncio.sleep(0)
            connection.refusing = refusing
            connection.join(new_scheduler(burst))
    raise AssertionError("they do not end")


KINDS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"n": 2, "best_of": 4},
    {"beam": {"width": 3}, "n": 3},
    {"beam": {"width": 2}, "n": 2, "prompt_logprobs": 1},
    {"logprobs": 2, "n": 2},
    {"prompt_logprobs": 2, "n": 3},
    {"stop": ["END", "a va🙂x"], "n": 2},
    {"stop": ["END"], "min_tokens": 25, "include_stop_str_in_output": True},
    {"stop_token_ids": [ord("E")]},
]


@st.composite
def requests(draw: st.DrawFn) -> tuple[inference_pb2.GenerateRequest, int]:
    kind = draw(st.sampled_from(KINDS))
    most = draw(st.integers(max(1, kind.get("min_tokens", 1)), 40))
    prompt = draw(st.text("abc", min_size=1, max_size=9))
    request = request_of(prompt, max_tokens=most, **kind)
    request.echo = draw(st.booleans()) and "beam" not in kind and "best_of" not in kind
    return request, draw(st.integers(0, 20))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    asked=st.lists(requests(), min_size=1, max_size=4),
    deaths=st.lists(st.integers(0, 25), min_size=1, max_size=3),
    burst=st.integers(1, 3),
    refusing=st.sampled_from([0, 0, 0, 2]),
)
def test_whatever_dies_every_client_sees_all_and_nothing_twice(
    tokenizer: Tokenizer,
    asked: list[tuple[inference_pb2.GenerateRequest, int]],
    deaths: list[int],
    burst: int,
    refusing: int,
) -> None:
    calm = [Client(request, at) for request, at in asked]
    asyncio.run(play(tokenizer, calm, [], burst, 0))
    disturbed = [Client(request, at) for request, at in asked]
    asyncio.run(play(tokenizer, disturbed, deaths, burst, refusing))
    assert [each.answer() for each in disturbed] == [each.answer() for each in calm]
