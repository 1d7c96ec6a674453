"""The Python client's ExternalSampler against the real engine: the program draws the tokens."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from engine import Engine, running_engine
from small_engines import SMALL, tiny_model
from triptych.client.api import (
    Answer,
    AsyncClient,
    Client,
    ClientOptions,
    DeadlineExceeded,
    ExternalSampler,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    LogitsRow,
    RetryPolicy,
    SamplerError,
    SamplingParams,
)
from triptych.v1 import common_pb2, control_pb2

pytestmark = pytest.mark.e2e

ROWS = 8
GRACE = 30.0
PROMPTS = [f"Number {number}" for number in range(ROWS)]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0)
OWN = SamplingParams(max_tokens=24, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("own-sampler")
    model = tiny_model(folder, max_position_embeddings=1024)
    flags = ("--sampler-rows", str(ROWS))
    with running_engine(model, folder / "run", *SMALL, *flags) as engine:
        yield engine


@pytest.fixture(scope="module")
def hasty_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Waits for no token, and for no sampler that it does not know, for long."""
    folder = tmp_path_factory.mktemp("hasty")
    model = tiny_model(folder, max_position_embeddings=1024)
    with running_engine(model, folder / "run", *SMALL, "--sampler-timeout", "2") as engine:
        yield engine


@pytest.fixture
def client(engine: Engine) -> Iterator[Client]:
    with Client(engine.address) as client:
        yield client


@pytest.fixture
def hasty(hasty_engine: Engine) -> Iterator[Client]:
    with Client(hasty_engine.address) as client:
        yield client


def argmax(row: LogitsRow) -> np.integer:
    return np.asarray(row.logits).argmax()


def gumbel(row: LogitsRow) -> np.integer:
    """A draw with noise of the tag and the position."""
    noise = np.random.default_rng([row.tag, row.position]).gumbel(size=len(row.logits))
    return (np.asarray(row.logits) + noise).argmax()


def scheduler(engine: Engine) -> control_pb2.SchedulerStats:
    return engine.stats("scheduler").scheduler


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GRACE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def uncached(answer: Answer) -> Answer:
    """Without what depends on who came before."""
    answer.usage.ClearField("cached_tokens")
    return answer


def wait_for_no_lease(engine: Engine) -> None:
    engine.wait_idle()
    wait_until(lambda: not scheduler(engine).sampler_leases)
    stats = scheduler(engine)
    assert (stats.sampler_rows, stats.sampler_rows_used) == (0, 0)


@pytest.mark.parametrize("through", ["rpc", "session"])
def test_own_greedy_answers_are_the_engine_s(engine: Engine, client: Client, through: str) -> None:
    expected = [client.generate(prompt, GREEDY).answer() for prompt in PROMPTS]
    before = scheduler(engine).external_tokens_total
    sampler = ExternalSampler(engine.run_dir, argmax, num_rows=ROWS)
    with client.session() as session, sampler:
        ask = session if through == "session" else client
        streams = [ask.generate(prompt, sampler.params(OWN)) for prompt in PROMPTS]
        others = [ask.generate(prompt, GREEDY) for prompt in PROMPTS]
        found = [stream.answer() for stream in streams]
        assert [stream.answer().token_ids for stream in others] == [
            each.token_ids for each in expected
        ]
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert [each.text for each in found] == [each.text for each in expected]
    assert [each.usage.completion_tokens for each in found] == [24] * ROWS
    assert scheduler(engine).external_tokens_total - before == ROWS * 24
    wait_for_no_lease(engine)


def test_all_that_is_not_the_draw_is_as_always(engine: Engine, client: Client) -> None:
    whole = client.generate("once", GREEDY).answer()
    text = whole.text
    cases: list[SamplingParams] = [
        SamplingParams(max_tokens=24, stop=[text[9:11]]),
        SamplingParams(max_tokens=24, stop=[text[9:11]], include_stop_str_in_output=True),
        SamplingParams(max_tokens=24, stop_token_ids=[whole.token_ids[13]]),
        SamplingParams(max_tokens=5, prompt_logprobs=2),
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=60),
    ]
    with client.session() as session, ExternalSampler(engine.run_dir, argmax) as sampler:
        for params in cases:
            own = sampler.params(params)
            params.temperature = 0
            for ask in (client.generate, client.chat, session.chat):
                assert uncached(ask("once", own).answer()) == uncached(ask("once", params).answer())
        request = GenerateRequest(text="once", echo=True, sampling_params=sampler.params(OWN))
        assert client.generate(request).answer().text == "once" + text


def test_the_asyncio_client(engine: Engine, client: Client) -> None:
    expected = [client.generate(prompt, GREEDY).answer().token_ids for prompt in PROMPTS]

    async def main() -> None:
        sampler = await asyncio.to_thread(ExternalSampler, engine.run_dir, argmax, num_rows=ROWS)
        with sampler:
            async with AsyncClient(engine.address) as other, other.session() as session:
                streams = [
                    (other, session)[at % 2].generate(prompt, sampler.params(OWN))
                    for at, prompt in enumerate(PROMPTS)
                ]
                answers = await asyncio.gather(*(stream.answer() for stream in streams))
        assert [answer.token_ids for answer in answers] == expected

    asyncio.run(main())
    wait_for_no_lease(engine)


def test_a_tag_is_a_seed(engine: Engine, client: Client) -> None:
    def ask(*tags: int) -> list[list[int]]:
        with ExternalSampler(engine.run_dir, gumbel) as sampler:
            streams = [client.generate("once", sampler.params(OWN, tag=tag)) for tag in tags]
            return [stream.answer().token_ids for stream in streams]

    first = ask(1, 2, 2**64 - 1, 1)
    assert first[0] == first[3]
    assert len({*map(tuple, first)}) == 3
    assert ask(2**64 - 1, 1) == [first[2], first[0]]


@pytest.mark.parametrize("killed", ["executor-0", "scheduler", "tokenizer-0"])
def test_answers_go_on_when_a_process_dies(engine: Engine, killed: str) -> None:
    """Draws are made again where a position comes again; the client sees one answer."""
    with (
        Client(engine.address, ClientOptions(timeout=90)) as client,
        ExternalSampler(engine.run_dir, gumbel, num_rows=4) as sampler,
    ):
        undisturbed = [
            client.generate("once", sampler.params(LONG, tag=tag)).answer() for tag in range(4)
        ]
        pid = engine.pid(killed)

        def is_killed() -> bool:
            """In the middle of all answers, which are whole all the same."""
            streams = [client.generate("once", sampler.params(LONG, tag=tag)) for tag in range(4)]
            heads = [next(stream).token_ids for stream in streams]
            midway = engine.kill_midway(killed, 4)
            tails = [stream.answer().token_ids for stream in streams]
            for head, tail, whole in zip(heads, tails, undisturbed, strict=True):
                assert [*head, *tail] == whole.token_ids
            return midway

        assert any(is_killed() for _ in range(10))  # a busy machine may be late
        assert engine.pid(killed) != pid
        assert sampler.error is None
        # And new ones are taken.
        again = client.generate("once", sampler.params(LONG, tag=1)).answer()
        assert again.token_ids == undisturbed[1].token_ids
    wait_for_no_lease(engine)


def test_another_model_is_drawn_from(engine: Engine, client: Client, tmp_path: Path) -> None:
    first = engine.stats("tokenizer-0").tokenizer
    model = tiny_model(tmp_path, seed=5, vocab_size=384)
    with ExternalSampler(engine.run_dir, argmax) as sampler:
        before = client.generate("once", sampler.params(OWN)).answer().token_ids
        engine.load_model(model)
        own = client.generate("once", sampler.params(OWN)).answer().token_ids
        assert own == client.generate("once", GREEDY).answer().token_ids
        assert own != before
        engine.load_model(tiny_model(engine.run_dir.parent))
        assert client.generate("once", sampler.params(OWN)).answer().token_ids == before
    assert engine.stats("tokenizer-0").tokenizer.address == first.address


def test_more_requests_than_rows_have_their_turn(engine: Engine) -> None:
    patient = ClientOptions(timeout=60, retry=RetryPolicy(attempts=1000, first_wait=0.01))
    with (
        Client(engine.address, patient) as client,
        ExternalSampler(engine.run_dir, argmax, num_rows=2) as sampler,
        ExternalSampler(engine.run_dir, argmax, num_rows=ROWS - 2),
    ):
        streams = [client.generate("once", sampler.params(OWN)) for _ in range(7)]
        answers = [stream.answer().token_ids for stream in streams]
        assert answers == [client.generate("once", GREEDY).answer().token_ids] * 7
        with pytest.raises(SamplerError, match=f"others hold {ROWS} rows"):
            ExternalSampler(engine.run_dir, argmax, num_rows=1, timeout=2)
    with pytest.raises(SamplerError, match=f"refuses the lease: num_rows: {ROWS + 1}"):
        ExternalSampler(engine.run_dir, argmax, num_rows=ROWS + 1)
    wait_for_no_lease(engine)


class Broken(RuntimeError):
    pass


def test_a_draw_that_raises_is_what_the_program_is_told(
    hasty_engine: Engine, hasty: Client
) -> None:
    def draw(row: LogitsRow) -> np.integer:
        if row.position == 5:
            raise Broken("no more")
        return argmax(row)

    def ask() -> None:
        with ExternalSampler(hasty_engine.run_dir, draw) as sampler:
            hasty.generate("once", sampler.params(OWN), timeout=60).answer()

    with pytest.raises(SamplerError, match="draw raised Broken: no more") as caught:
        ask()
    assert isinstance(caught.value.__cause__, Broken)
    wait_for_no_lease(hasty_engine)


def test_what_is_left_or_closed_frees_its_row(hasty_engine: Engine, hasty: Client) -> None:
    with ExternalSampler(hasty_engine.run_dir, argmax, num_rows=1) as sampler:
        for _ in range(3):
            with hasty.generate("once", sampler.params(LONG)) as stream:
                next(stream)
        longer = SamplingParams(max_tokens=1000, ignore_eos=True)
        with hasty.generate("once", sampler.params(longer)) as stream:
            next(stream)
            sampler.close()
            with pytest.raises(InvalidRequest) as caught:
                stream.answer()
            assert caught.value.field == "sampling_params.external_sampler.lease"
    wait_for_no_lease(hasty_engine)


def test_a_draw_that_takes_too_long(hasty_engine: Engine, hasty: Client) -> None:
    """Its request ends, and the sampler goes on."""
    late = threading.Event()
    before = scheduler(hasty_engine).sampler_timeouts_total

    def draw(row: LogitsRow) -> np.integer:
        if row.position == 3:
            late.wait(GRACE)
        return argmax(row)

    with ExternalSampler(hasty_engine.run_dir, draw) as sampler:
        with pytest.raises(DeadlineExceeded, match="sampler_timeout"):
            hasty.generate("once", sampler.params(OWN)).answer()
        late.set()
        own = hasty.generate("once", sampler.params(OWN)).answer()
        assert own.token_ids == hasty.generate("once", GREEDY).answer().token_ids
        assert scheduler(hasty_engine).sampler_timeouts_total == before + 1


@pytest.mark.parametrize(
    "refused",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(top_p=0.9),
        SamplingParams(n=2),
        SamplingParams(logprobs=1),
        SamplingParams(min_tokens=1),
    ],
    ids=str,
)
def test_what_is_the_draw_s_business_is_refused(
    engine: Engine, client: Client, refused: SamplingParams
) -> None:
    with ExternalSampler(engine.run_dir, argmax) as sampler:
        params = sampler.params(refused)
        with pytest.raises(InvalidRequest) as caught:
            client.generate("once", params).answer()
        ((field, _),) = refused.ListFields()
        assert caught.value.field == f"sampling_params.{field.name}"


def test_a_lease_that_nobody_holds(hasty: Client) -> None:
    params = SamplingParams(external_sampler=common_pb2.ExternalSampler(lease=77))
    with pytest.raises(InvalidRequest) as caught:
        hasty.generate("once", params).answer()
    assert caught.value.field == "sampling_params.external_sampler.lease"


@pytest.mark.smollm
def test_the_real_model(smollm: Path, tmp_path: Path) -> None:
    greedy = SamplingParams(max_tokens=24, temperature=0)
    with (
        running_engine(smollm, tmp_path / "run", "--kv-cache-memory", "128MiB") as engine,
        Client(engine.address) as client,
        ExternalSampler(engine.run_dir, argmax) as sampler,
    ):
        own = sampler.params(SamplingParams(max_tokens=24))
        question = "What is the capital of France?"
        answer = client.chat(question, own).answer()
        assert answer.text == "The capital of France is Paris."
        assert answer.finish_reason == FinishReason.FINISH_REASON_STOP
        streams = [client.generate(prompt, own) for prompt in PROMPTS]
        expected = [client.generate(prompt, greedy).answer() for prompt in PROMPTS]
        found = [stream.answer() for stream in streams]
        assert [*map(uncached, found)] == [*map(uncached, expected)]
