"""Choices, logprobs, echo, beams and labels through the tokenizer service and real sockets."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from choices import Choices
from fake_scheduler import fake_logprob, fake_top
from scripted_models import T1_EOS, T1_VOCABULARY
from tokenizer_bench import (
    FOREVER,
    INVALID,
    LENGTH,
    STOP,
    Bench,
    bench,
    exhausted,
    fields_of,
    refused,
    request_of,
    run,
    status_of,
    until,
)
from triptych.services.tokenizer.server import LoadedModel
from triptych.v1 import common_pb2, inference_pb2, stage_pb2

SMILE = "🙂".encode()


async def read(b: Bench, prompt: str | list[int] = "hi", **params: Any) -> Choices:
    return await read_request(b, request_of(prompt, **params))


async def read_request(b: Bench, request: inference_pb2.GenerateRequest) -> Choices:
    choices = Choices()
    async for response in b.stub.Generate(request, timeout=60):
        choices.add(response)
    assert choices.usage is not None
    return choices


def letters(_submit: stage_pb2.Submit, choice: int) -> list[int]:
    return [ord("a") + choice] * 50


def test_choices_stream_side_by_side(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(
            model, tmp_path / "run", choice_script=letters, cached_tokens=1, interval=0.1
        ) as b:
            choices = await read(b, n=3, max_tokens=4, seed=5)
            assert choices.text == {0: "aaaa", 1: "bbbb", 2: "cccc"}
            assert choices.finish == dict.fromkeys(range(3), LENGTH)
            assert choices.messages > 3
            assert choices.usage == common_pb2.Usage(
                prompt_tokens=2, completion_tokens=12, cached_tokens=1
            )
            submit = b.scheduler.submits[0]
            assert (submit.params.n, submit.params.seed) == (3, 5)
            await read(b, n=2, max_tokens=1)
            first, second = (each.slot for each in b.scheduler.submits)
            assert second == first + 3
            await b.idle()
            assert b.scheduler.aborts == []

    run(scenario)


def test_a_stop_string_aborts_its_own_slot(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", choice_script=letters, interval=0.02) as b:
            choices = await read(b, n=3, max_tokens=30, stop=["bbb"])
            assert choices.text == {0: "a" * 30, 1: "", 2: "c" * 30}
            assert choices.finish == {0: LENGTH, 1: STOP, 2: LENGTH}
            await until(lambda: b.scheduler.aborts == [b.scheduler.submits[0].slot + 1])
            await b.idle()

    run(scenario)


def test_cancel_aborts_every_choice(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER) as b:
            call = b.stub.Generate(request_of(n=5))
            await call.read()
            call.cancel()
            slot = b.scheduler.submits[0].slot
            await until(lambda: sorted(b.scheduler.aborts) == list(range(slot, slot + 5)))
            await b.idle()

    run(scenario)


def test_a_session_delivers_all_choices(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", choice_script=letters, burst=50) as b:
            call = b.stub.Session()
            for number in (1, 2):
                start = inference_pb2.SessionStart(
                    id=number, generate=request_of(n=4, max_tokens=20)
                )
                await call.write(inference_pb2.SessionRequest(start=start))
            await call.done_writing()
            found: dict[int, Choices] = defaultdict(Choices)
            async for response in call:
                for event in response.events:
                    found[event.id].add(event.output)
            for number in (1, 2):
                texts = {index: letter * 20 for index, letter in enumerate("abcd")}
                assert found[number].text == texts
                assert found[number].usage is not None
            await b.idle()

    run(scenario)


def test_a_session_cancels_all_choices(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", choice_script=letters) as b:
            call = b.stub.Session()
            start = inference_pb2.SessionStart(id=1, generate=request_of(n=2))
            await call.write(inference_pb2.SessionRequest(start=start))
            await until(lambda: all(job.sent == 50 for job in b.scheduler.jobs.values())
                        and len(b.scheduler.jobs) == 2)  # fmt: skip
            cancel = inference_pb2.SessionCancel(id=1)
            await call.write(inference_pb2.SessionRequest(cancel=cancel))
            await call.done_writing()
            choices = Choices()
            async for response in call:
                for event in response.events:
                    choices.add(event.output)
            assert set(choices.finish.values()) == {common_pb2.FINISH_REASON_ABORT}
            assert choices.text == {0: "a" * 50, 1: "b" * 50}
            await b.idle()

    run(scenario)


def test_a_failing_choice_fails_the_request_and_stops_the_others(
    model: LoadedModel, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER, failing_choice=1, interval=0.01) as b:
            error = await refused(exhausted(b.stub.Generate(request_of(n=3))))
            assert error.code() is grpc.StatusCode.INTERNAL
            slot = b.scheduler.submits[0].slot
            await until(lambda: sorted(b.scheduler.aborts) == [slot, slot + 2])
            await b.idle()

    run(scenario)


def test_best_of(model: LoadedModel, tmp_path: Path) -> None:
    """fake_logprob: a token's is -0.5 - id % 8, so "h" (104) beats "i", and "i" beats "j"."""

    def script(_submit: stage_pb2.Submit, choice: int) -> list[int]:
        return [*[b"j", b"iii", b"kk", b"hh"][choice], T1_EOS]

    async def scenario() -> None:
        async with bench(model, tmp_path / "run", choice_script=script) as b:
            choices = await read(b, n=2, best_of=4, stop_token_ids=[T1_EOS])
            # Best by mean, the end of sequence (258 % 8 = 2: -2.5) included.
            assert choices.text == {0: "hh", 1: "iii"}
            assert choices.score[0] == pytest.approx((-0.5 - 0.5 - 2.5) / 3)
            assert choices.score[1] == pytest.approx((-1.5 * 3 - 2.5) / 4)
            assert choices.messages == 2
            assert choices.logprobs[0] == []
            assert choices.usage is not None
            assert choices.usage.completion_tokens == 12
            assert b.scheduler.submits[0].params.n == 4
            await b.idle()

    run(scenario)


def test_beam_hypotheses_come_whole_with_their_scores(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", choice_script=letters) as b:
            beam = common_pb2.BeamSearch(width=3, length_penalty=0.5)
            choices = await read(b, n=2, beam=beam, max_tokens=5)
            assert choices.text == {0: "aaaaa", 1: "bbbbb"}
            assert choices.score == {0: 0.0, 1: -1.0}
            assert choices.messages == 2
            sent = b.scheduler.submits[0].params
            assert (sent.n, sent.beam.width, sent.beam.length_penalty) == (2, 3, 0.5)
            await b.idle()

    run(scenario)


@pytest.mark.parametrize("burst", [1, 100])
def test_logprobs_stand_beside_tokens(model: LoadedModel, tmp_path: Path, burst: int) -> None:
    tokens = [*b"a", *SMILE, *b"b", T1_EOS]

    async def scenario() -> None:
        async with bench(model, tmp_path / "run", tokens, burst=burst) as b:
            choices = await read(b, logprobs=2)
            rows = choices.logprobs[0]
            assert [row.token_id for row in rows] == choices.ids[0] == tokens
            assert b"".join(row.token for row in rows) == choices.text[0].encode()
            assert [row.text for row in rows[:3]] == ["a", "\\xf0", "\\x9f"]
            assert rows[-1].text == "<|eos|>"
            for position, row in enumerate(rows):
                assert (row.logprob, row.rank) == (fake_logprob(row.token_id), 1)
                assert [top.token_id for top in row.top] == fake_top(position, 2)
                assert [top.logprob for top in row.top] == [
                    fake_logprob(top.token_id) for top in row.top
                ]
                assert [top.token for top in row.top] == [bytes([top.token_id]) for top in row.top]

    run(scenario)


def test_logprobs_0_and_none(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", b"abc") as b:
            rows = (await read(b, logprobs=0, max_tokens=3)).logprobs[0]
            assert [(row.logprob, len(row.top)) for row in rows] == [
                (fake_logprob(token), 0) for token in b"abc"
            ]
            assert (await read(b, max_tokens=3)).logprobs[0] == []
            assert not b.scheduler.submits[1].params.HasField("logprobs")

    run(scenario)


def test_logprobs_of_the_vocabulary(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", b"abc", max_logprobs=-1) as b:
            rows = (await read(b, logprobs=-1, max_tokens=3)).logprobs[0]
            assert b.scheduler.submits[0].params.logprobs == T1_VOCABULARY
            for row in rows:
                values = np.array(row.vocabulary_logprobs)
                assert values.shape == (T1_VOCABULARY,)
                known = np.isfinite(values)
                assert set(np.flatnonzero(known).tolist()) == set(range(256))
                expected = [fake_logprob(token) for token in range(256)]
                assert values[known].tolist() == expected
                assert len(row.top) == 0
        async with bench(model, tmp_path / "run", b"abc") as b:
            error = await refused(b.stub.Generate(request_of(logprobs=-1)).read())
            assert error.code() is INVALID
            assert fields_of(status_of(error)) == ["sampling_params.logprobs"]

    run(scenario)


@pytest.mark.parametrize("form", [1, 2])
def test_logprobs_in_every_output_format(model: LoadedModel, tmp_path: Path, form: Any) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", SMILE) as b:
            request = request_of(logprobs=0, max_tokens=4)
            request.output_format = form
            choices = await read_request(b, request)
            assert [row.token_id for row in choices.logprobs[0]] == list(SMILE)
            assert choices.text[0] == ("🙂" if form == 1 else "")
            assert choices.ids[0] == ([] if form == 1 else list(SMILE))

    run(scenario)


@pytest.mark.parametrize("prompt", ["héllo", list("héllo".encode())])
def test_prompt_logprobs(model: LoadedModel, tmp_path: Path, prompt: str | list[int]) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", b"abc") as b:
            choices = await read(b, prompt, prompt_logprobs=1, max_tokens=3, n=2)
            rows = choices.prompt_logprobs
            assert [row.token_id for row in rows] == list("héllo".encode())
            assert not rows[0].HasField("logprob")
            assert [row.logprob for row in rows[1:]] == [
                fake_logprob(row.token_id) for row in rows[1:]
            ]
            assert [len(row.top) for row in rows] == [0] + [1] * 5
            assert choices.logprobs[0] == []

    run(scenario)


@pytest.mark.parametrize("prompt", ["héllo", list("héllo".encode())])
def test_echo(model: LoadedModel, tmp_path: Path, prompt: str | list[int]) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", SMILE) as b:
            request = request_of(prompt, logprobs=1, max_tokens=4, n=2)
            request.echo = True
            choices = await read_request(b, request)
            for index in (0, 1):
                assert choices.text[index] == "héllo🙂"
                assert bytes(choices.ids[index]) == "héllo🙂".encode()
                rows = choices.logprobs[index]
                assert b"".join(row.token for row in rows) == "héllo🙂".encode()
                assert [row.HasField("logprob") for row in rows] == [False] + [True] * 9
            assert choices.prompt_logprobs == []
            assert choices.usage is not None
            assert (choices.usage.prompt_tokens, choices.usage.completion_tokens) == (6, 8)
            assert b.service.stats().tokenizer.tokens_total == 8
            request.sampling_params.ClearField("logprobs")
            plain = await read_request(b, request)
            assert plain.text[0] == "héllo🙂"
            assert plain.logprobs[0] == []

    run(scenario)


def test_labels_and_time_outs_reach_the_scheduler(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        failure = stage_pb2.Failure(
            reason=stage_pb2.FAILURE_REASON_TIMED_OUT, message="queue_timeout: 0.05 s in the queue"
        )
        async with bench(model, tmp_path / "run", failure=failure) as b:
            request = request_of()
            request.cache_salt, request.tenant, request.priority = "salt", "who", -3
            request.queue_timeout_ms, request.timeout_ms = 50, 1000
            error = await refused(b.stub.Generate(request).read())
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "0.05 s" in (error.details() or "")
            (submit,) = b.scheduler.submits
            assert (submit.cache_salt, submit.tenant, submit.priority) == ("salt", "who", -3)
            assert (submit.queue_timeout_ms, submit.timeout_ms) == (50, 1000)

    run(scenario)


def test_bad_words_are_encoded(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", b"abc") as b:
            await read(b, bad_words=["ab"], max_tokens=1)
            words = [np.frombuffer(word, "<u4").tolist() for word in
                     b.scheduler.submits[0].params.bad_words]  # fmt: skip
            assert words == [list(b"ab")]

    run(scenario)


def test_slots_begin_anew_behind_those_that_run(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER, interval=0.01) as b:
            call = b.stub.Generate(request_of(n=3))
            await call.read()
            b.service.client._open._next_slot = 2**32 - 2  # as after billions of requests
            for count, first in ((2, 2**32 - 2), (2, 4), (1, 6)):
                assert (await read(b, n=count, max_tokens=1)).finish == dict.fromkeys(
                    range(count), LENGTH
                )
                assert b.scheduler.submits[-1].slot == first
            call.cancel()
            await b.idle()

    run(scenario)
