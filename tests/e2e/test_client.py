"""The Python client against the real engine, over the death of its tokenizer process too."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import Engine, running_engine
from faults import wait_for
from small_engines import SMALL, tiny_model
from triptych.client.api import (
    AsyncClient,
    ChatMessage,
    Client,
    ClientOptions,
    DeadlineExceeded,
    GenerateRequest,
    InvalidRequest,
    QueueFull,
    RetryPolicy,
    SamplingParams,
    UnknownModel,
)

pytestmark = pytest.mark.e2e

LONG = SamplingParams(max_tokens=400, ignore_eos=True, seed=3)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("client")
    model = tiny_model(folder, max_position_embeddings=1024)
    with running_engine(model, folder / "run", *SMALL) as engine:
        yield engine


@pytest.fixture
def client(engine: Engine) -> Iterator[Client]:
    with Client(engine.address) as client:
        yield client


def test_streams_and_whole_answers(engine: Engine, client: Client) -> None:
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    pieces = list(client.generate([1, 2, 3], params))
    answer = client.generate([1, 2, 3], params).answer()
    assert [token for piece in pieces for token in piece.token_ids] == answer.token_ids
    plain = engine.generate([1, 2, 3], max_tokens=12, seed=1, ignore_eos=True)
    assert answer.token_ids == plain.token_ids
    assert answer.usage.completion_tokens == 12
    assert client.chat("hi", SamplingParams(max_tokens=3)).answer().usage.completion_tokens <= 3


def test_tokens_models_and_errors(client: Client) -> None:
    ids = client.tokenize("héllo")
    assert client.detokenize(ids) == "héllo"
    assert client.tokenize([ChatMessage(role="user", content="x")])
    (model,) = client.models()
    assert model.vocabulary_size > max(ids)
    with pytest.raises(InvalidRequest) as caught:
        client.generate("x", SamplingParams(top_p=1.5)).answer()
    assert caught.value.field == "sampling_params.top_p"
    with pytest.raises(UnknownModel) as unknown:
        client.generate("x", model="gpt").answer()
    assert unknown.value.model == "gpt"


def test_what_is_left_or_late_frees_everything(engine: Engine, client: Client) -> None:
    with client.generate("x", LONG) as stream:
        next(stream)
    for _ in client.generate("y", LONG):
        break
    with pytest.raises(DeadlineExceeded):
        client.generate(GenerateRequest(text="z", sampling_params=LONG, timeout_ms=5)).answer()
    engine.wait_idle()


def test_a_session_of_many_threads(engine: Engine, client: Client) -> None:
    expected = {seed: client.generate("x", seeded(seed)).answer().token_ids for seed in range(8)}
    found: dict[int, list[int]] = {}
    with client.session() as session:

        def ask(seed: int) -> None:
            found[seed] = session.generate("x", seeded(seed)).answer().token_ids

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        with session.generate("left", LONG) as left:
            next(left)
        for thread in threads:
            thread.join(60)
    assert found == expected
    engine.wait_idle()


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=20, seed=seed, ignore_eos=True)


@pytest.mark.parametrize("through", ["rpc", "session"])
def test_an_answer_goes_on_when_the_tokenizer_dies(
    engine: Engine, client: Client, through: str
) -> None:
    undisturbed = client.generate("once", LONG).answer()
    first_pid = engine.pid("tokenizer-0")

    def is_killed() -> bool:
        """In the middle of an answer, which is whole all the same."""
        with client.session() as session:
            asked = session if through == "session" else client
            stream = asked.generate("once", LONG, timeout=90)
            first = next(stream)
            killed = engine.kill_midway("tokenizer-0")
            rest = stream.answer()
        assert 0 < len(first.token_ids) < 400
        assert [*first.token_ids, *rest.token_ids] == undisturbed.token_ids
        assert first.text + rest.text == undisturbed.text
        return killed

    assert len(undisturbed.token_ids) == 400
    assert any(is_killed() for _ in range(10))  # a busy machine may be late
    assert engine.pid("tokenizer-0") != first_pid
    engine.wait_idle()


def test_the_asyncio_client(engine: Engine, client: Client) -> None:
    expected = client.generate("once", LONG).answer().token_ids

    async def is_killed() -> bool:
        """In the middle of answers, which are whole all the same."""
        async with AsyncClient(engine.address) as other, other.session() as session:
            streams = [other.generate("once", LONG, timeout=90) for _ in range(3)]
            streams += [session.generate("once", LONG, timeout=90) for _ in range(3)]
            first = await anext(streams[0])
            killed = engine.kill_midway("tokenizer-0")
            answers = await asyncio.gather(*(stream.answer() for stream in streams))
            assert list(first.token_ids) + answers[0].token_ids == expected
            assert all(answer.token_ids == expected for answer in answers[1:])
            return killed

    assert any(asyncio.run(is_killed()) for _ in range(10))  # a busy machine may be late
    engine.wait_idle()


def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    """More at once than the engine takes: all are answered, none twice."""
    flags = ("--max-num-seqs", "1", "--max-num-waiting", "1")
    model = tiny_model(tmp_path, max_position_embeddings=1024)

    def full(engine: Engine) -> bool:
        now = engine.stats("scheduler").scheduler
        there = (now.requests_running, now.requests_waiting)
        return there == (1, 1) and now.requests_refused_total >= 4

    with running_engine(model, tmp_path / "run", *SMALL, *flags) as engine:
        hurry = ClientOptions(retry=RetryPolicy(attempts=1))
        patient = ClientOptions(timeout=100, retry=RetryPolicy(attempts=100))
        with Client(engine.address, patient) as client, client.session() as session:
            with engine.frozen(), Client(engine.address, hurry) as other:  # no place becomes free
                streams = [(client, session)[each % 2].generate("x", LONG) for each in range(6)]
                wait_for(lambda: full(engine) or None, "the queue does not fill")
                with pytest.raises(QueueFull) as caught:
                    other.generate("x", LONG).answer()
            assert caught.value.retry_after
            answers = [stream.answer().token_ids for stream in streams]
            assert all(len(each) == 400 for each in answers)
            assert all(each == answers[0] for each in answers)
            engine.wait_idle()
