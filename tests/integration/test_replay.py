"""Schedulers that die and come back, over real sockets: what the clients of each door see."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fake_scheduler
from choices import Choices, values
from fake_scheduler import FakeScheduler
from http_bench import events, http_bench
from tokenizer_bench import FOREVER, Bench, bench, request_of, run, until
from triptych.services.runtime.run_dir import RunDir
from triptych.services.tokenizer.server import LoadedModel
from triptych.v1 import common_pb2, inference_pb2, stage_pb2

TEXT = "ab🙂 héllo END ça va🙂🙂 END of it"
JSON_SCHEMA = common_pb2.StructuredOutput(json_schema='{"type":"string"}')


def script(submit: stage_pb2.Submit, choice: int) -> Sequence[int]:
    """Another text for each choice, of characters of several bytes."""
    return list(((TEXT[7 * choice % 11 :] + TEXT) * 5).encode())


@asynccontextmanager
async def successors(b: Bench, folder: Path, *schedulers: FakeScheduler) -> AsyncIterator[None]:
    """Each takes over when the one before is dead; the last one stays."""
    endpoint = RunDir.open(folder).scheduler_endpoint

    async def live(before: FakeScheduler, scheduler: FakeScheduler, *others: FakeScheduler) -> None:
        await until(lambda: before.dead and not b.service.client.connected)
        scheduler.endpoint = endpoint
        with fake_scheduler.running(scheduler):
            await until(lambda: scheduler.dead and bool(others), timeout=90)
        await live(scheduler, *others)

    lives = asyncio.create_task(live(b.scheduler, *schedulers))
    try:
        yield
    finally:
        lives.cancel()
        await asyncio.wait((lives,))
        if not lives.cancelled():
            lives.result()


def scripted(most_outputs: int = -1, **fields: Any) -> FakeScheduler:
    return FakeScheduler(
        "", lambda _: [], choice_script=script, most_outputs=most_outputs, prompt_rows=2,
        split_beams=True, **fields,
    )  # fmt: skip


async def read(b: Bench, request: inference_pb2.GenerateRequest) -> Choices:
    choices = Choices()
    async for response in b.stub.Generate(request, timeout=60):
        choices.add(response)
    return choices


def answer_of(choices: Choices) -> dict[str, object]:
    usage = choices.usage
    assert usage is not None
    return {
        "text": dict(choices.text),
        "ids": dict(choices.ids),
        "logprobs": {index: values(rows) for index, rows in choices.logprobs.items()},
        "prompt_logprobs": values(choices.prompt_logprobs),
        "finish": choices.finish,
        "score": choices.score,
        "tokens": (usage.prompt_tokens, usage.completion_tokens),
    }


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"seed": 7},
    "n": {"n": 3},
    "best_of": {"n": 2, "best_of": 3},
    "beam": {"beam": common_pb2.BeamSearch(width=3), "n": 3},
    "logprobs": {"logprobs": 2, "n": 2},
    "prompt_logprobs": {"prompt_logprobs": 2, "n": 2},
    "stop": {"stop": ["END of", "va🙂x"], "n": 2},
    "min_tokens": {"stop": ["END"], "min_tokens": 25},
    "grammar": {"structured_output": JSON_SCHEMA},
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_deaths_and_every_client_sees_the_same(
    model: LoadedModel, tmp_path: Path, kind: str
) -> None:
    request = request_of("hello you", max_tokens=60, **KINDS[kind])
    options = {"choice_script": script, "prompt_rows": 2, "split_beams": True}

    async def calm() -> Choices:
        async with bench(model, tmp_path / "calm", **options) as b:
            return await read(b, request)

    async def scenario() -> None:
        expected = answer_of(await calm())
        async with bench(model, tmp_path / "run", most_outputs=7, **options) as b:
            second, third = scripted(most_outputs=11), scripted()
            async with successors(b, tmp_path / "run", second, third):
                assert answer_of(await read(b, request)) == expected
                stats = b.service.stats().tokenizer
            first = b.scheduler.submits[0]
            for scheduler in (second, third):
                for submit in scheduler.submits:
                    assert submit.accepted
                    assert submit.params.seed == first.params.seed
                    assert submit.prompt_token_ids == first.prompt_token_ids
                if kind == "grammar":
                    assert [after for after, _ in scheduler.vocabularies] == [0]
            assert stats.schedulers_lost_total == 2
            assert stats.choices_resubmitted_total >= 2

    run(scenario)


def test_choices_that_have_ended_do_not_go_out_again(model: LoadedModel, tmp_path: Path) -> None:
    """Of three, one has ended, one has tokens, one has none: the two go out alone."""

    def lengths(submit: stage_pb2.Submit, choice: int) -> Sequence[int]:
        return [b"abX", b"cdefgh", b""][choice]

    async def scenario() -> None:
        async with bench(model, tmp_path / "run", choice_script=lengths) as b:
            request = request_of(n=3, max_tokens=9, stop=["X"])
            asked = asyncio.create_task(read(b, request))
            await until(lambda: b.scheduler.outputs_sent >= 6 and b.service.client.streams == 2)
            b.scheduler.stop()
            last = scripted()
            last.choice_script = lambda submit, choice: b"abX cdefghij klmnopqrs"[4 * choice :]
            async with successors(b, tmp_path / "run", last):
                choices = await asked
            assert choices.text == {0: "ab", 1: "cdefghij ", 2: "ghij klmn"}
            first, second = last.submits
            assert [each.slot - b.scheduler.submits[0].slot for each in last.submits] == [1, 2]
            assert [each.choice for each in last.submits] == [1, 2]
            assert [each.params.n for each in last.submits] == [1, 1]
            assert first.output_token_ids[::4] == b"cdefgh"
            assert second.output_token_ids == b""
            assert first.age_ms <= second.age_ms  # both from the first submission on

    run(scenario)


def test_requests_made_meanwhile_wait_and_go_out_in_order(
    model: LoadedModel, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER, interval=0.01) as b:
            calls = []
            for n in range(1, 5):
                if n == 3:
                    b.scheduler.stop()
                    await until(lambda: not b.service.client.connected)
                most = 500 if n < 3 else 5
                calls.append(asyncio.create_task(b.generate("a" * n, max_tokens=most)))
                await until(partial(lambda n: b.service.client.streams == n, n))
            new = FakeScheduler("", lambda _: FOREVER)
            async with successors(b, tmp_path / "run", new):
                for call, count in zip(calls, (500, 500, 5, 5), strict=True):
                    assert (await call).text == "a" * count
            assert [len(each.prompt_token_ids) // 4 for each in new.submits] == [1, 2, 3, 4]
            assert [each.accepted for each in new.submits] == [True, True, False, False]
            slots = [each.slot for each in (*b.scheduler.submits, *new.submits[2:])]
            assert len(set(slots)) == 4
            assert b.service.client.streams == 0

    run(scenario)


def test_many_go_out_again_in_order(model: LoadedModel, tmp_path: Path) -> None:
    """More than go out in one turn of the event loop."""

    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER, interval=0.01, paused=True) as b:
            calls = [asyncio.create_task(b.generate(max_tokens=60)) for _ in range(150)]
            await until(lambda: len(b.scheduler.submits) == 150)
            b.scheduler.paused, b.scheduler.most_outputs = False, 9
            new = FakeScheduler("", lambda _: FOREVER)
            async with successors(b, tmp_path / "run", new):
                for call in calls:
                    assert (await call).text == "a" * 60
            slots = [submit.slot for submit in new.submits]
            assert slots == sorted(slots)
            assert len(slots) == 150
            assert b.service.stats().tokenizer.choices_resubmitted_total == 150

    run(scenario)


def test_who_cancels_while_it_waits_is_forgotten(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER, interval=0.01) as b:
            gone = b.stub.Generate(request_of("gone", n=2))
            await gone.read()
            stays = asyncio.create_task(b.generate("stays", max_tokens=300))
            await until(lambda: len(b.scheduler.submits) == 2)
            b.scheduler.stop()
            await until(lambda: not b.service.client.connected)
            gone.cancel()
            held = b.stub.Generate(request_of("held"))
            await until(lambda: b.service.client.streams == 2)
            held.cancel()
            await until(lambda: b.service.client.streams == 1)
            new = FakeScheduler("", lambda _: FOREVER)
            async with successors(b, tmp_path / "run", new):
                assert (await stays).text == "a" * 300
            assert [len(each.prompt_token_ids) // 4 for each in new.submits] == [5]
            assert new.aborts == []

    run(scenario)


def test_a_forgotten_tokenizer_goes_on(model: LoadedModel, tmp_path: Path) -> None:
    """It was frozen for so long that the scheduler took it for dead."""

    async def scenario() -> None:
        async with bench(model, tmp_path / "run", choice_script=script, interval=0.02) as b:
            asked = asyncio.create_task(b.generate(max_tokens=90))
            await until(lambda: b.scheduler.outputs_sent > 10)
            b.scheduler.forget_peers()
            assert (await asked).ids == list(script(stage_pb2.Submit(), 0))[:90]
            assert len(b.scheduler.hellos) >= 2
            assert b.scheduler.submits[-1].accepted
            await b.idle()

    run(scenario)


def test_a_slow_reader_waits_too_and_is_ended_as_ever(model: LoadedModel, tmp_path: Path) -> None:
    long = [263] * 100_000  # of 20,000 characters each: the transport's buffers are soon full

    async def scenario() -> None:
        async with bench(model, tmp_path / "run", long, max_unread_tokens=500, interval=0.01) as b:
            slow = b.stub.Generate(request_of())
            await slow.read()
            await until(lambda: b.scheduler.outputs_sent > 20)
            b.scheduler.stop()
            await until(lambda: not b.service.client.connected)
            assert b.service.client.streams == 1
            new = FakeScheduler("", lambda _: long)
            async with successors(b, tmp_path / "run", new):
                await until(lambda: len(new.aborts) == 1)
                assert (await b.generate(max_tokens=1)).ids == [263]
            slow.cancel()

    run(scenario)


def test_a_session_goes_on(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", choice_script=script, most_outputs=20) as b:
            call = b.stub.Session()
            for number in range(1, 4):
                start = inference_pb2.SessionStart(
                    id=number, generate=request_of("x" * number, max_tokens=70)
                )
                await call.write(inference_pb2.SessionRequest(start=start))
            await call.done_writing()
            found: dict[int, Choices] = {number: Choices() for number in range(1, 4)}
            async with successors(b, tmp_path / "run", scripted()):
                async for response in call:
                    for event in response.events:
                        found[event.id].add(event.output)
            ids = list(script(stage_pb2.Submit(), 0))[:70]
            assert [each.ids[0] for each in found.values()] == [ids] * 3

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_http_goes_on(model: LoadedModel, tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with http_bench(
            model, tmp_path / "run", choice_script=script, most_outputs=30, interval=0.005
        ) as b:
            async with successors(b.behind, tmp_path / "run", scripted()):
                answer = await b.complete(max_tokens=90, stream=stream, n=2)
            assert answer.status_code == 200
            texts = ["", ""]
            data = events(answer.text) if stream else [json.loads(answer.text)]
            for each in data:
                for choice in each["choices"]:
                    texts[choice["index"]] += choice["text"]
            raw = [bytes(script(stage_pb2.Submit(), choice)[:90]) for choice in range(2)]
            assert texts == [each.decode(errors="replace") for each in raw]

    run(scenario)
