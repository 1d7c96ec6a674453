"""The tokenizer service over real sockets, with a scripted scheduler behind it."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

import fake_scheduler
from fake_scheduler import FakeScheduler
from scripted_models import T1_BOS, T1_EOS, T1_IM_END, write_m2_random_llama, write_t1_tokenizer
from triptych.services.runtime.model_files import resolve_model
from triptych.services.runtime.run_dir import RunDir
from triptych.services.tokenizer.server import LoadedModel, TokenizerService
from triptych.services.tokenizer.settings import TokenizerSettings
from triptych.services.tokenizer.tokenizer import load_tokenizer
from triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc, stage_pb2

V = 320
STOP, LENGTH, ABORT = 1, 2, 3
INVALID = grpc.StatusCode.INVALID_ARGUMENT
FOREVER = [ord("a")] * 100_000
LONG = 263  # a token of 20,000 characters


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    write_t1_tokenizer(folder, ["DEF", "HI", "z" * 20_000])
    write_m2_random_llama(folder)
    tokenizer = load_tokenizer(resolve_model(str(folder)))
    return LoadedModel(tokenizer, "print", ("tiny", "alias"))


class Bench:
    """A running service, its scheduler and a client."""

    def __init__(
        self, service: TokenizerService, scheduler: FakeScheduler, channel: grpc.aio.Channel
    ) -> None:
        self.service = service
        self.scheduler = scheduler
        self.channel = channel
        self.stub = inference_pb2_grpc.InferenceServiceStub(channel)

    async def generate(self, prompt: str | list[int] = "hi", **params: Any) -> "Joined":
        joined = Joined()
        async for response in self.stub.Generate(request_of(prompt, **params), timeout=20):
            joined.add(response)
        return joined

    async def idle(self) -> None:
        await until(
            lambda: (
                not self.scheduler.jobs
                and self.service.stats().tokenizer.streams == 0
                and self.service.stats().tokenizer.requests_running == 0
            )
        )


class Joined:
    """A whole stream."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.messages = 0
        self.last = inference_pb2.GenerateResponse()

    def add(self, response: "inference_pb2.GenerateResponse | inference_pb2.ChatResponse") -> None:
        assert not self.last.finish_reason, "nothing follows the last response"
        self.text += response.text
        self.ids += response.token_ids
        self.messages += 1
        self.last = inference_pb2.GenerateResponse.FromString(response.SerializeToString())


def request_of(prompt: str | list[int] = "hi", **params: Any) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(sampling_params=common_pb2.SamplingParams(**params))
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.CopyFrom(common_pb2.TokenIds(ids=prompt))
    return request


async def until(condition: Callable[[], bool], timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def bench(
    model: LoadedModel, folder: Path, script: object = b"abc", **options: Any
) -> AsyncIterator[Bench]:
    """`script`: tokens of every request, or a function of its Submit. Others: settings, fields."""
    folder.mkdir(mode=0o700, exist_ok=True)
    run_dir = RunDir.open(folder)
    fields = {key: options.pop(key) for key in list(options) if hasattr(FakeScheduler, key)
              or key in FakeScheduler.__dataclass_fields__}  # fmt: skip
    settings = TokenizerSettings(
        model="m", run_dir=str(folder), port=0, heartbeat_interval=0.1, heartbeat_timeout=2.0,
        **options,
    )  # fmt: skip
    answer = script if callable(script) else lambda submit: list(script)  # type: ignore[call-overload]  # test input
    with fake_scheduler.running(
        FakeScheduler(run_dir.scheduler_endpoint, answer, **fields)
    ) as scheduler:
        service = TokenizerService(settings, run_dir, model)
        await service.start()
        try:
            async with grpc.aio.insecure_channel(service.address) as channel:
                await until(lambda: service.client.connected or bool(scheduler.refusal))
                yield Bench(service, scheduler, channel)
        finally:
            await service.stop(0.0)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(bounded())


async def refused(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def exhausted(
    call: "grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]",
) -> inference_pb2.GenerateResponse:
    """Read to the end; the last response."""
    last = inference_pb2.GenerateResponse()
    while isinstance(response := await call.read(), inference_pb2.GenerateResponse):
        last = response
    return last


def status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return status_pb2.Status.FromString(value)
    raise AssertionError("no details")


def fields_of(status: status_pb2.Status) -> list[str]:
    request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(request)
    return [violation.field for violation in request.field_violations]


def has_retry(status: status_pb2.Status) -> bool:
    retry = error_details_pb2.RetryInfo()
    return any(d.Unpack(retry) and retry.retry_delay.ToMilliseconds() > 0 for d in status.details)


# ---- output


def test_generate_streams_text_ids_and_usage(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", "é世!".encode()) as b:
            joined = await b.generate("hello", max_tokens=6)
            assert joined.text == "é世!"
            assert joined.ids == list("é世!".encode())
            assert joined.last.finish_reason == LENGTH
            assert joined.last.usage.prompt_tokens == 5
            assert joined.last.usage.completion_tokens == 6
            submit = b.scheduler.submits[0]
            assert submit.prompt_token_ids == b"".join(c.to_bytes(4, "little") for c in b"hello")
            assert T1_EOS in submit.params.stop_token_ids
            await b.idle()

    run(scenario)


def test_one_message_per_drain_not_per_token(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER, burst=64) as b:
            joined = await b.generate(max_tokens=640)
            assert len(joined.ids) == 640
            assert joined.messages <= 20

    run(scenario)


@pytest.mark.parametrize(
    ("script", "params", "text", "tokens", "reason"),
    [
        (b"abcdef", {"max_tokens": 3}, "abc", 3, LENGTH),
        ([*b"abc", T1_EOS], {}, "abc", 4, STOP),
        ([*b"abc", T1_EOS], {"max_tokens": 4}, "abc", 4, STOP),
        (b"abcde", {"max_tokens": 5, "stop": ["de"]}, "abc", 5, STOP),
        (b"abcdefgh", {"stop": ["cd"]}, "ab", 4, STOP),
        (b"abcdefgh", {"stop": ["cd"], "include_stop_str_in_output": True}, "abcd", 4, STOP),
        (b"a\nb\nc", {"stop": ["\n"], "min_tokens": 3}, "a\nb", 4, STOP),
        (b"abXc", {"stop": ["bXd"], "max_tokens": 4}, "abXc", 4, LENGTH),
        ([*b"ab", T1_IM_END, *b"c"], {"max_tokens": 4}, "abc", 4, LENGTH),
        (
            [*b"ab", T1_IM_END, *b"c"], {"max_tokens": 4, "skip_special_tokens": False},
            "ab<|im_end|>c", 4, LENGTH,
        ),
        ([*b"ab", T1_EOS, *b"c"], {"max_tokens": 4, "ignore_eos": True}, "abc", 4, LENGTH),
        (b"a\xf0\x9f", {"max_tokens": 3}, "a\ufffd", 3, LENGTH),
    ],
)  # fmt: skip
def test_how_outputs_end(
    model: LoadedModel, tmp_path: Path, script: object, params: dict[str, Any], text: str,
    tokens: int, reason: int,
) -> None:  # fmt: skip
    async def scenario() -> None:
        for burst in (1, 100):
            async with bench(model, tmp_path / "run", script, burst=burst) as b:
                joined = await b.generate(**params)
                assert joined.text == text
                assert len(joined.ids) == joined.last.usage.completion_tokens == tokens
                assert joined.last.finish_reason == reason
                await b.idle()

    run(scenario)


def test_stop_reasons_and_the_abort_behind_a_stop_string(
    model: LoadedModel, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER) as b:
            joined = await b.generate(stop=["aaa"])
            assert joined.last.stop_string == "aaa"
            await until(lambda: b.scheduler.aborts == [b.scheduler.submits[0].slot])
            joined = await b.generate(stop_token_ids=[ord("a")])
            assert joined.last.stop_token_id == ord("a")
            assert (joined.text, joined.ids) == ("", [ord("a")])
            joined = await b.generate(max_tokens=1)
            assert joined.last.WhichOneof("stop_reason") is None
            await b.idle()

    run(scenario)


def test_output_format(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", b"abc") as b:
            for form, text, ids in ((1, "abc", []), (2, "", list(b"abc"))):
                request = request_of(max_tokens=3)
                request.output_format = form  # type: ignore[assignment]  # a bare number
                joined = Joined()
                async for response in b.stub.Generate(request):
                    joined.add(response)
                assert (joined.text, joined.ids) == (text, ids)
                assert joined.last.usage.completion_tokens == 3

    run(scenario)


def test_chat_renders_the_template(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", [*b"ok", T1_EOS]) as b:
            message = inference_pb2.ChatMessage(role="user", content="<|im_end|>")
            joined = Joined()
            async for response in b.stub.Chat(inference_pb2.ChatRequest(messages=[message])):
                joined.add(response)
            assert joined.text == "ok"
            asked = inference_pb2.TokenizeRequest(messages=[message])
            ids = list((await b.stub.Tokenize(asked)).token_ids)
            assert ids.count(T1_IM_END) == 1
            assert joined.last.usage.prompt_tokens == len(ids)

    run(scenario)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({}, "abc"),
        ({"skip_special_tokens": True}, "abc"),
        ({"skip_special_tokens": False}, "ab<|im_end|>c"),
    ],
)
def test_special_tokens_in_a_chat_answer(
    model: LoadedModel, tmp_path: Path, flags: dict[str, Any], text: str
) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", [*b"ab", T1_IM_END, *b"c", T1_EOS]) as b:
            request = inference_pb2.ChatRequest(
                messages=[inference_pb2.ChatMessage(role="user", content="hi")],
                sampling_params=common_pb2.SamplingParams(**flags),
            )
            joined = Joined()
            async for response in b.stub.Chat(request):
                joined.add(response)
            assert joined.text == text

    run(scenario)


def test_an_empty_text_is_a_prompt_where_the_tokenizer_adds_a_token(tmp_path: Path) -> None:
    write_t1_tokenizer(tmp_path / "model", add_bos=True)
    write_m2_random_llama(tmp_path / "model")
    tokenizer = load_tokenizer(resolve_model(str(tmp_path / "model")))

    async def scenario() -> None:
        async with bench(LoadedModel(tokenizer, "print", ("m",)), tmp_path / "run", b"abc") as b:
            joined = await b.generate("", max_tokens=3)
            assert (joined.text, joined.last.usage.prompt_tokens) == ("abc", 1)
            bare = request_of("")
            bare.add_special_tokens = False
            for request in (bare, request_of([])):
                error = await refused(b.stub.Generate(request).read())
                assert error.code() is INVALID

    run(scenario)


def test_tokenize_detokenize_and_list_models(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run") as b:
            long = "héllo " * 3000
            reply = await b.stub.Tokenize(inference_pb2.TokenizeRequest(text=long))
            assert list(reply.token_ids) == list(long.encode())
            assert reply.max_model_len == 4096
            ids = [*reply.token_ids, T1_BOS]
            back = await b.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids))
            assert back.text == long
            models = (await b.stub.ListModels(inference_pb2.ListModelsRequest())).models
            assert [each.name for each in models] == ["tiny", "alias"]
            assert models[0].vocabulary_size == V
            assert models[0].has_chat_template
            assert T1_EOS in models[0].eos_token_ids

    run(scenario)


# ---- refusals


def test_bad_requests_are_refused_at_once_and_leave_nothing(
    model: LoadedModel, tmp_path: Path
) -> None:
    cases: list[tuple[inference_pb2.GenerateRequest, str]] = [
        (inference_pb2.GenerateRequest(), "prompt"),
        (request_of(""), "text"),
        (request_of([]), "token_ids"),
        (request_of([1, V]), "token_ids.ids[1]"),
        (request_of([2**32 - 1]), "token_ids.ids[0]"),
        (request_of([1] * 4096), "token_ids"),
        (request_of([1] * 4095, max_tokens=2), "sampling_params.max_tokens"),
        (request_of("x" * 1_000_000), "text"),
        (request_of(temperature=float("nan")), "sampling_params.temperature"),
        (request_of(stop=["x"] * 500_000), "sampling_params.stop"),
        (request_of(stop_token_ids=[V]), "sampling_params.stop_token_ids[0]"),
    ]

    async def scenario() -> None:
        async with bench(model, tmp_path / "run") as b:
            for request, field in cases:
                started = time.monotonic()
                error = await refused(b.stub.Generate(request).read())
                assert error.code() is INVALID, field
                assert fields_of(status_of(error)) == [field]
                assert time.monotonic() - started < 1
            assert not b.scheduler.submits
            await b.idle()
            assert (await b.generate(max_tokens=3)).text == "abc"

    run(scenario)


@pytest.mark.parametrize("name", ["nobody", "Tiny", "tiny ", "../x", "x" * 10_000])
def test_an_unknown_model_everywhere(model: LoadedModel, tmp_path: Path, name: str) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run") as b:
            message = inference_pb2.ChatMessage(role="user", content="a")
            calls: list[Awaitable[object]] = [
                b.stub.Generate(inference_pb2.GenerateRequest(model=name, text="a")).read(),
                b.stub.Chat(inference_pb2.ChatRequest(model=name, messages=[message])).read(),
                b.stub.Tokenize(inference_pb2.TokenizeRequest(model=name, text="a")),
                b.stub.Detokenize(inference_pb2.DetokenizeRequest(model=name)),
            ]
            for call in calls:
                error = await refused(call)
                assert error.code() is grpc.StatusCode.NOT_FOUND
                info = error_details_pb2.ResourceInfo()
                assert status_of(error).details[0].Unpack(info)
            request = request_of(max_tokens=3)
            request.model = "alias"
            assert len([r async for r in b.stub.Generate(request)]) >= 1

    run(scenario)


def test_a_large_message_is_refused_by_its_size(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", max_message_bytes=100_000) as b:
            error = await refused(b.stub.Generate(request_of("x" * 200_000)).read())
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await b.generate(max_tokens=3)).text == "abc"

    run(scenario)


def test_frequent_pings_do_not_kill_a_quiet_stream(model: LoadedModel, tmp_path: Path) -> None:
    """With gRPC's defaults this stream ends after five seconds: GOAWAY, "too many pings"."""
    pings = (
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_timeout_ms", 5000),
        ("grpc.http2.max_pings_without_data", 0),
    )

    async def scenario() -> None:
        async with (
            bench(model, tmp_path / "run", b"abc", paused=True) as b,
            grpc.aio.insecure_channel(b.service.address, options=pings) as channel,
        ):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Generate(request_of(max_tokens=3))
            await asyncio.sleep(6.5)
            b.scheduler.paused = False
            assert (await exhausted(call)).finish_reason == LENGTH

    run(scenario)


def test_an_answer_that_is_too_large_to_send_is_said_by_field(
    model: LoadedModel, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", max_message_bytes=4096) as b:
            text = inference_pb2.TokenizeRequest(
                text="\u00ff" * 2000
            )  # two tokens of two bytes each
            ids = inference_pb2.DetokenizeRequest(
                token_ids=[T1_IM_END] * 1000, skip_special_tokens=False
            )
            for call, field in ((b.stub.Tokenize(text), "text"),
                                (b.stub.Detokenize(ids), "token_ids")):  # fmt: skip
                error = await refused(call)
                assert error.code() is INVALID
                assert fields_of(status_of(error)) == [field]
                assert "max_message_bytes 4096" in str(error.details())

    run(scenario)


def test_too_many_streams(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER, max_streams=2) as b:
            calls = [b.stub.Generate(request_of()) for _ in range(2)]
            for call in calls:
                await call.read()
            error = await refused(b.stub.Generate(request_of()).read())
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "2" in (error.details() or "")
            assert has_retry(status_of(error))
            for call in calls:
                call.cancel()
            await b.idle()
            assert (await b.generate(max_tokens=3)).text == "aaa"

    run(scenario)


@pytest.mark.parametrize(
    ("reason", "code", "retry"),
    [
        (stage_pb2.FAILURE_REASON_QUEUE_FULL, grpc.StatusCode.RESOURCE_EXHAUSTED, True),
        (stage_pb2.FAILURE_REASON_UNAVAILABLE, grpc.StatusCode.UNAVAILABLE, True),
        (stage_pb2.FAILURE_REASON_TOO_LONG, INVALID, False),
        (stage_pb2.FAILURE_REASON_NOT_FINITE, grpc.StatusCode.INTERNAL, False),
    ],
)
def test_failures_of_the_scheduler(
    model: LoadedModel, tmp_path: Path, reason: Any, code: grpc.StatusCode, retry: bool
) -> None:
    failure = stage_pb2.Failure(reason=reason, message="field: said", retry_after_ms=5)

    async def scenario() -> None:
        async with bench(model, tmp_path / "run", failure=failure) as b:
            error = await refused(b.stub.Generate(request_of()).read())
            assert error.code() is code
            assert "said" in (error.details() or "")
            assert has_retry(status_of(error)) == retry
            await b.idle()
            assert not b.scheduler.aborts

    run(scenario)


# ---- cancel, deadline, slow


def test_cancel_reaches_the_scheduler(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER) as b:
            call = b.stub.Generate(request_of())
            await call.read()
            call.cancel()
            await until(lambda: b.scheduler.aborts == [b.scheduler.submits[0].slot])
            b.scheduler.paused = True
            waiting = b.stub.Generate(request_of())
            await until(lambda: len(b.scheduler.submits) == 2)
            waiting.cancel()
            await until(lambda: len(b.scheduler.aborts) == 2)
            await b.idle()

    run(scenario)


def test_a_lost_connection_aborts(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER) as b:
            async with grpc.aio.insecure_channel(b.service.address) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                call = stub.Generate(request_of())
                await call.read()
            await until(lambda: len(b.scheduler.aborts) == 1)
            await b.idle()

    run(scenario)


def test_deadlines(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER) as b:
            for _ in range(10):
                error = await refused(b.stub.Generate(request_of(), timeout=0.0).read())
                assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await b.idle()
            assert not b.scheduler.submits
            b.scheduler.paused = True
            error = await refused(b.stub.Generate(request_of(), timeout=0.2).read())
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: bool(b.scheduler.aborts))
            await b.idle()

    run(scenario)


def test_a_slow_reader_is_ended_and_its_work_stopped(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        # Large pieces of text, so that the transport's own buffers are full soon.
        def script(submit: stage_pb2.Submit) -> list[int]:
            return [LONG] * 100_000 if len(submit.prompt_token_ids) == 4 else list(b"abc")

        async with bench(model, tmp_path / "run", script, max_unread_tokens=50) as b:
            slow = b.stub.Generate(request_of([1]))
            await slow.read()
            await until(lambda: len(b.scheduler.aborts) == 1, timeout=10)
            assert (await b.generate([1, 2], max_tokens=3)).text == "abc"
            error = await refused(exhausted(slow))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "more than 50 tokens" in (error.details() or "")
            await b.idle()

    run(scenario)


# ---- session


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
        async with bench(model, tmp_path / "run", by_prompt) as b:
            events = Events(b)
            for number in range(20):
                await events.start(number, request_of([65 + number], max_tokens=30))
            await events.start(100, request_of([V]))
            await events.start(101, inference_pb2.GenerateRequest(model="nobody", text="a"))
            await events.call.write(
                inference_pb2.SessionRequest(start=inference_pb2.SessionStart(id=102))
            )
            await events.call.done_writing()
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
        async with bench(model, tmp_path / "run", by_prompt) as b:
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


# ---- health, lifecycle


async def health_of(b: Bench, service: str = "triptych.v1.InferenceService") -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    status: int = (await health_pb2_grpc.HealthStub(b.channel).Check(request)).status
    return status


def test_health_follows_the_executor(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run") as b:
            assert await health_of(b) == await health_of(b, "") == 1
            b.scheduler.executor_ready = False
            await until(lambda: not b.service.client.ready)
            assert await health_of(b) == 2
            error = await refused(b.stub.Generate(request_of()).read())
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert has_retry(status_of(error))
            b.scheduler.executor_ready = True
            await until(lambda: b.service.client.ready)
            assert (await b.generate(max_tokens=3)).text == "abc"

    run(scenario)


def test_health_tells_of_a_stuck_step(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run") as b:
            watch = health_pb2_grpc.HealthStub(b.channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == 1
            b.scheduler.step_age_ms = 2001
            assert (await watch.read()).status == 2
            assert (await b.generate(max_tokens=3)).text == "abc"  # it waits, nothing is refused
            b.scheduler.step_age_ms = 0
            assert (await watch.read()).status == 1

    run(scenario)


def test_torn_outputs_end_the_connection_and_not_the_process(
    model: LoadedModel, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER, torn=True) as b:
            error = await refused(exhausted(b.stub.Generate(request_of())))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            b.scheduler.jobs.clear()
            b.scheduler.torn = False
            await until(lambda: b.service.client.ready)
            assert (await b.generate(max_tokens=3)).text == "aaa"
            assert not b.service.client.ended.done()

    run(scenario)


def test_a_dead_scheduler_fails_streams_and_a_new_one_is_found(
    model: LoadedModel, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER) as b:
            call = b.stub.Generate(request_of())
            await call.read()
            b.scheduler.stop()
            error = await refused(exhausted(call))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert has_retry(status_of(error))
            assert not b.service.client.ready
            assert await health_of(b) == 2
            endpoint = RunDir.open(tmp_path / "run").scheduler_endpoint
            with fake_scheduler.running(FakeScheduler(endpoint, lambda _: list(b"new"))):
                await until(lambda: b.service.client.ready)
                assert (await b.generate(max_tokens=3)).text == "new"

    run(scenario)


def test_a_silent_scheduler_counts_as_gone(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER) as b:
            call = b.stub.Generate(request_of())
            await call.read()
            b.scheduler.paused = b.scheduler.silent = True
            error = await refused(exhausted(call))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            b.scheduler.forget_peers()
            b.scheduler.paused = b.scheduler.silent = False
            await until(lambda: b.service.client.ready, timeout=8)
            await until(lambda: b.scheduler.beats > 0)

    run(scenario)


def test_a_new_epoch_fails_streams(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER) as b:
            call = b.stub.Generate(request_of())
            await call.read()
            b.scheduler.jobs.clear()
            b.scheduler.epoch += 1
            error = await refused(exhausted(call))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            await until(lambda: b.service.client.ready)
            assert len(b.scheduler.hellos) == 2

    run(scenario)


def test_a_refusal_ends_the_process_with_its_reason(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", refusal="another model") as b:
            assert await asyncio.wait_for(b.service.client.ended, 5) == "another model"

    run(scenario)


def test_stop_drains(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER, interval=0.01) as b:
            watch = health_pb2_grpc.HealthStub(b.channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == 1
            call = b.stub.Generate(request_of(max_tokens=50))
            await call.read()
            stopping = asyncio.create_task(b.service.stop(10))
            assert (await watch.read()).status == 2
            error = await refused(b.stub.Generate(request_of()).read())
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert (await exhausted(call)).finish_reason == LENGTH
            started = time.monotonic()
            await stopping
            assert time.monotonic() - started < 2

    run(scenario)


def test_stop_cuts_off_after_the_grace(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER) as b:
            call = b.stub.Generate(request_of())
            await call.read()
            await b.service.stop(0.1)
            error = await refused(exhausted(call))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert b.service.client.streams == 0

    run(scenario)


def test_seeds(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", b"abc") as b:
            for _ in range(2):
                await b.generate(max_tokens=1)
            await b.generate(max_tokens=1, seed=0)
            seeds = [submit.params.seed for submit in b.scheduler.submits]
            assert seeds[0] != seeds[1]
            assert seeds[2] == 0
        async with bench(model, tmp_path / "run", b"abc", seed=7) as b:
            await b.generate(max_tokens=1)
            assert b.scheduler.submits[0].params.seed == 7

    run(scenario)
