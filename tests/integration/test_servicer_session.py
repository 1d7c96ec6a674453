"""Many requests on one stream of the tokenizer service."""

import asyncio
import json
from pathlib import Path

import grpc

from tokenizer_bench import (
    FOREVER,
    INVALID,
    Bench,
    V,
    bench,
    refused,
    request_of,
    run,
    until,
)
from triptych.services.tokenizer.server import LoadedModel
from triptych.v1 import common_pb2, inference_pb2, stage_pb2


class Events:
    """A Session call and what it has said."""

    def __init__(self, b: Bench) -> None:
        self.call = b.stub.Session()
        self.text: dict[int, str] = {}
        self.ends: dict[int, list[str]] = {}
        self.responses = 0

    async def start(self, number: int, request: inference_pb2.GenerateRequest) -> None:
        start = inference_pb2.SessionStart(id=number, generate=request)
        await self.call.write(inference_pb2.SessionRequest(start=start))

    async def cancel(self, number: int) -> None:
        cancel = inference_pb2.SessionCancel(id=number)
        await self.call.write(inference_pb2.SessionRequest(cancel=cancel))

    async def read(self, count: int) -> None:
        """Until so many requests have ended, or the end of the stream."""
        while sum(map(len, self.ends.values())) < count:
            response = await self.call.read()
            if not isinstance(response, inference_pb2.SessionResponse):
                return  # grpc.aio.EOF
            self.responses += 1
            for event in response.events:
                self.text[event.id] = self.text.get(event.id, "") + event.output.text
                if event.HasField("error"):
                    end = grpc.StatusCode((event.error.code, name_of(event.error.code))).name
                    self.ends.setdefault(event.id, []).append(end)
                elif event.output.finish_reason:
                    name = common_pb2.FinishReason.Name(event.output.finish_reason)
                    self.ends.setdefault(event.id, []).append(name.removeprefix("FINISH_REASON_"))


def name_of(code: int) -> str:
    return next(each.value[1] for each in grpc.StatusCode if each.value[0] == code)


def by_prompt(submit: stage_pb2.Submit) -> list[int]:
    return [submit.prompt_token_ids[0]] * 100_000


def test_a_session_multiplexes(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", by_prompt, paused=True) as b:
            events = Events(b)
            for number in range(20):
                await events.start(number, request_of([65 + number], max_tokens=30))
            await events.start(100, request_of([V]))
            await events.start(101, inference_pb2.GenerateRequest(model="nobody", text="a"))
            await events.call.write(
                inference_pb2.SessionRequest(start=inference_pb2.SessionStart(id=102))
            )
            await events.call.done_writing()
            await until(lambda: len(b.scheduler.submits) == 20)
            b.scheduler.paused = False
            await events.read(1000)
            assert await events.call.code() is grpc.StatusCode.OK
            for number in range(20):
                assert events.text[number] == chr(65 + number) * 30
                assert events.ends[number] == ["LENGTH"]
            assert events.ends[100] == events.ends[102] == ["INVALID_ARGUMENT"]
            assert events.ends[101] == ["NOT_FOUND"]
            assert events.responses < 20 * 30 / 2
            await b.idle()

    run(scenario)


def test_a_session_cancels_by_id_and_refuses_a_running_id(
    model: LoadedModel, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", by_prompt, interval=0.01) as b:
            events = Events(b)
            await events.start(1, request_of([65]))
            await events.start(2, request_of([66]))
            await events.start(1, request_of([67]))
            await events.read(1)
            assert events.ends == {1: ["ALREADY_EXISTS"]}
            await events.cancel(7)
            await events.cancel(1)
            await events.read(2)
            assert events.ends == {1: ["ALREADY_EXISTS", "ABORT"]}
            await until(lambda: len(b.scheduler.aborts) == 1)
            await events.start(1, request_of([67], max_tokens=3))
            await events.read(3)
            assert events.text[1].endswith("CCC")
            events.call.cancel()
            await until(lambda: len(b.scheduler.aborts) == 2)
            await b.idle()

    run(scenario)


def test_a_session_without_action_is_an_error(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER) as b:
            events = Events(b)
            await events.start(1, request_of())
            await events.call.write(inference_pb2.SessionRequest())
            error = await refused(events.read(5))
            assert error.code() is INVALID
            await b.idle()

    run(scenario)


def test_a_session_that_floods_bad_requests_without_reading(
    model: LoadedModel, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", b"abc") as b:
            events = Events(b)

            async def flood() -> None:
                for number in range(3000):
                    await events.start(number, request_of([V]))
                await events.call.done_writing()

            writer = asyncio.create_task(flood())
            await asyncio.sleep(0.2)
            assert (await b.generate(max_tokens=3)).text == "abc"
            await events.read(3000)
            await writer
            assert len(events.ends) == 3000
            await b.idle()

    run(scenario)


HARD = common_pb2.StructuredOutput(  # its check takes longer than it may
    json_schema=json.dumps(
        {"allOf": [{"type": "string", "pattern": f".*a.{{{count}}}"} for count in range(14)]}
    )
)


def test_a_request_whose_check_is_slow_holds_up_no_other_and_can_be_cancelled(
    model: LoadedModel, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(
            model, tmp_path / "run", by_prompt, structured_output_check_seconds=60.0
        ) as b:
            events = Events(b)
            await events.start(1, request_of(max_tokens=3, structured_output=HARD, n=3))
            await until(lambda: b.service.stats().tokenizer.requests_running == 1)
            await events.start(1, request_of([66], max_tokens=3))
            await events.start(2, request_of([67], max_tokens=3))
            await events.read(2)
            assert events.ends == {1: ["ALREADY_EXISTS"], 2: ["LENGTH"]}
            await events.cancel(1)
            await events.read(3)
            assert events.ends[1] == ["ALREADY_EXISTS", "ABORT"]
            await b.idle()
            await events.start(1, request_of(max_tokens=3, structured_output=HARD))
            await events.cancel(1)  # at once
            await events.read(4)
            await events.start(1, request_of([68], max_tokens=3))
            await events.read(5)
            assert events.ends[1] == ["ALREADY_EXISTS", "ABORT", "ABORT", "LENGTH"]
            assert events.text[1] == "DDD"
            await events.start(1, request_of(max_tokens=3, structured_output=HARD))
            await until(lambda: b.service.stats().tokenizer.requests_running == 1)
            events.call.cancel()
            await b.idle()
            assert len(b.scheduler.submits) == 2

    run(scenario)
