"""Structured output at the tokenizer service: checked before anything runs."""

import asyncio
import json
import time
from pathlib import Path

import grpc
import psutil
import pytest

from tokenizer_bench import (
    FOREVER,
    INVALID,
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
from triptych.services.tokenizer.tokenizer import Tokenizer
from triptych.services.transport.vocabulary import vocabulary_from
from triptych.v1 import common_pb2

Structured = common_pb2.StructuredOutput
FIELD = "sampling_params.structured_output"
SCHEMA = Structured(json_schema='{"type":"object","properties":{"a":{"type":"integer"}}}')
HARD = Structured(
    json_schema=json.dumps(
        {"allOf": [{"type": "string", "pattern": f".*a.{{{count}}}"} for count in range(14)]}
    )
)


def test_the_scheduler_gets_the_grammar_and_the_vocabulary_before_it(
    model: LoadedModel, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run") as b:
            await b.generate(max_tokens=3)
            assert not b.scheduler.vocabularies
            await b.generate(max_tokens=3, structured_output=SCHEMA)
            await b.generate(max_tokens=3, structured_output=Structured(regex="a+"))
            plain, schema, regex = [submit.params.grammar for submit in b.scheduler.submits]
            assert not plain
            assert json.loads(schema)["grammars"][0]["json_schema"]["type"] == "object"
            assert "/a+/" in regex
            ((after, message),) = b.scheduler.vocabularies  # once on a connection
            assert after == 1
            vocabulary = vocabulary_from(message)
            assert len(vocabulary.tokens) == model.tokenizer.vocabulary_size
            assert vocabulary.tokens[ord("a")] == b"a"
            assert vocabulary.tokens[0x80:0xC0] == tuple(
                bytes([each]) for each in range(0x80, 0xC0)
            )
            assert vocabulary.eos_token_ids == tuple(sorted(model.tokenizer.eos_token_ids))
            special = model.tokenizer.special_token_ids | set(model.tokenizer.eos_token_ids)
            assert set(vocabulary.special_token_ids) == special

    run(scenario)


def test_a_new_scheduler_hears_the_vocabulary_again(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run") as b:
            await b.generate(max_tokens=3, structured_output=SCHEMA)
            hellos = len(b.scheduler.hellos)
            b.scheduler.forget_peers()
            b.scheduler.epoch += 1
            await until(lambda: len(b.scheduler.hellos) > hellos and b.service.client.ready)
            await b.generate(max_tokens=3)
            assert len(b.scheduler.vocabularies) == 1
            await b.generate(max_tokens=3, structured_output=SCHEMA)
            assert [after for after, _ in b.scheduler.vocabularies] == [0, 2]

    run(scenario)


REFUSED = [
    (Structured(), ""),
    (Structured(json_schema='{"uniqueItems":true}'), ".json_schema"),
    (Structured(regex="("), ".regex"),
    (Structured(grammar="start: x"), ".grammar"),
    (Structured(choice=common_pb2.Choices()), ".choice"),
    (Structured(structural_tag="{}"), ".structural_tag"),
    (Structured(json_object=True, whitespace_pattern=" *"), ".whitespace_pattern"),
    (Structured(json_schema="x" * (1 << 20)), ""),
]


def test_what_cannot_be_kept_is_refused_and_nothing_is_submitted(
    model: LoadedModel, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run") as b:
            for structured, suffix in REFUSED:
                request = request_of(max_tokens=3, structured_output=structured)
                error = await refused(b.stub.Generate(request).read())
                assert error.code() is INVALID
                assert fields_of(status_of(error)) == [FIELD + suffix]
                assert len(str(error.details())) < 600
            beam = common_pb2.BeamSearch(width=2)
            request = request_of(max_tokens=3, structured_output=SCHEMA, beam=beam)
            error = await refused(b.stub.Generate(request).read())
            assert fields_of(status_of(error)) == [FIELD]
            assert "beside beam" in str(error.details())
            outside = common_pb2.ExternalSampler(lease=1)
            request = request_of(max_tokens=3, structured_output=SCHEMA, external_sampler=outside)
            error = await refused(b.stub.Generate(request).read())
            assert fields_of(status_of(error)) == [FIELD]
            assert "beside external_sampler" in str(error.details())
            assert not b.scheduler.submits
            await b.idle()

    run(scenario)


def test_one_that_takes_too_long_holds_up_nobody(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(
            model, tmp_path / "run", script=FOREVER, structured_output_check_seconds=2.0
        ) as b:
            neighbour = b.stub.Generate(request_of(max_tokens=4000))
            gaps: list[float] = []

            async def read() -> None:
                before = time.monotonic()
                async for _ in neighbour:
                    gaps.append(time.monotonic() - before)
                    before = time.monotonic()

            reading = asyncio.create_task(read())
            request = request_of(max_tokens=3, structured_output=HARD)
            error = await refused(b.stub.Generate(request).read())
            assert "takes more than 2.0 s" in str(error.details())
            reading.cancel()
            await asyncio.wait((reading,))
            assert len(gaps) > 20
            neighbour.cancel()
            await b.idle()
            request = request_of(max_tokens=3, structured_output=SCHEMA)
            assert (await exhausted(b.stub.Generate(request))).finish_reason

    run(scenario)


def test_a_client_that_goes_meanwhile_submits_nothing(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", structured_output_check_seconds=1.0) as b:
            call = b.stub.Generate(request_of(max_tokens=3, structured_output=HARD), timeout=0.3)
            error = await refused(call.read())
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert (await b.generate(max_tokens=3, structured_output=SCHEMA)).last.finish_reason
            assert len(b.scheduler.submits) == 1

    run(scenario)


def test_nothing_stays_behind(model: LoadedModel, tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}

    async def scenario() -> None:
        async with bench(model, tmp_path / "run") as b:
            assert {child.pid for child in psutil.Process().children()} == before
            await b.generate(max_tokens=3, structured_output=SCHEMA)
            assert len(psutil.Process().children()) == len(before) + 1

    run(scenario)
    assert {child.pid for child in psutil.Process().children()} == before


def test_a_tokenizer_without_text_of_single_tokens(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "piece_table", None)

    async def scenario() -> None:
        async with bench(model, tmp_path / "run") as b:
            request = request_of(max_tokens=3, structured_output=SCHEMA)
            error = await refused(b.stub.Generate(request).read())
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert FIELD in str(error.details())
            assert not b.scheduler.submits

    run(scenario)
