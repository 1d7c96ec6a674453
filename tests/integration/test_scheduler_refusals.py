"""What the scheduler says no to, and that the others do not notice."""

import os
import socket

import zmq

from fake_executor import (
    NAN_TOKEN,
    RAISE_TOKEN,
    VOCABULARY,
    continuation,
)
from fake_tokenizer import FakeTokenizer
from scheduler_bench import Engine, MakeEngine
from triptych.engine_core.errors import InvalidRequest, NotFinite, TooLong, Unavailable
from triptych.engine_core.layout import LAYOUT_VERSION
from triptych.services.transport.channel import PROTOCOL_VERSION, DealerChannel, new_identity
from triptych.v1 import stage_pb2


def test_refusals_and_failures_end_their_own_request_only(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor(step_seconds=0.01)
    tokenizer = engine.tokenizer()
    good = tokenizer.submit([1, 2, 3], 20)
    long = tokenizer.submit([1] * 250, 20)
    unknown = tokenizer.submit([VOCABULARY], 5)
    infinite = tokenizer.submit([NAN_TOKEN], 5)
    torn = stage_pb2.Submit(slot=99, prompt_token_ids=b"abc")
    tokenizer.send_submit(torn)
    tokenizer.until(lambda: tokenizer.ended(good, long, unknown, infinite, 99))
    assert isinstance(tokenizer.failed[long], TooLong)
    assert isinstance(tokenizer.failed[unknown], InvalidRequest)
    assert isinstance(tokenizer.failed[infinite], NotFinite)
    assert isinstance(tokenizer.failed[99], InvalidRequest)
    assert tokenizer.tokens[good] == continuation([1, 2, 3], 20)
    engine.until_idle()
    assert engine.stats.requests_refused_total == 3


def test_a_step_that_raises_ends_its_requests_and_no_more(make_engine: MakeEngine) -> None:
    engine = make_engine()
    executor = engine.executor()
    tokenizer = engine.tokenizer()
    bad = tokenizer.submit([RAISE_TOKEN], 5)
    tokenizer.until(lambda: tokenizer.ended(bad))
    assert isinstance(tokenizer.failed[bad], Unavailable)
    assert "told to raise" in str(tokenizer.failed[bad])
    good = tokenizer.submit([1], 5)
    tokenizer.until(lambda: tokenizer.ended(good))
    assert tokenizer.tokens[good] == continuation([1], 5)
    engine.until_idle()
    os.kill(executor.pid, 0)


def test_a_second_executor_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor()
    engine.tokenizer()
    code, said = engine.executor().wait(60)
    assert code == 2
    assert said.strip().splitlines()[-1] == (
        "triptych executor: error: the scheduler refused: another executor is connected"
    )
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit([1], 3)
    tokenizer.until(lambda: tokenizer.ended(slot))


def test_an_executor_of_another_model_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = engine.executor()
    engine.tokenizer()
    first.kill()
    engine.until(lambda: not engine.stats.executor_ready)
    code, said = engine.executor(fingerprint="other").wait(60)
    assert code == 2
    assert "fingerprint: this scheduler serves fake-model, the executor has other" in said


def test_versions_must_match(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tokenizer = engine.stranger(protocol_version=PROTOCOL_VERSION + 1)
    tokenizer.until(lambda: tokenizer.refused)
    assert tokenizer.refused == (
        f"this scheduler speaks protocol {PROTOCOL_VERSION}, the tokenizer {PROTOCOL_VERSION + 1}"
    )
    engine.executor()
    assert "the executor runs fake-model" in refusal(engine.stranger(fingerprint="other"))
    large = engine.stranger(vocabulary_size=VOCABULARY + 1)
    assert "98 is above the model's 97" in refusal(large)
    engine.tokenizer(vocabulary_size=VOCABULARY - 1)
    assert "97 differs from the 96 of others" in refusal(engine.stranger())


def refusal(tokenizer: FakeTokenizer) -> str:
    tokenizer.until(lambda: tokenizer.refused)
    return str(tokenizer.refused)


def hello(engine: Engine, *, model: stage_pb2.ModelFacts | None = None, **changes: int) -> str:
    """Say an executor's hello with changes; why it is refused."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel: DealerChannel[stage_pb2.ExecutorReply, stage_pb2.ExecutorMessage] = DealerChannel(
        context, engine.run_dir.executor_endpoint, stage_pb2.ExecutorReply, new_identity("e")
    )
    said = stage_pb2.ExecutorHello(
        protocol_version=PROTOCOL_VERSION, layout_version=LAYOUT_VERSION, model=model
    )
    for name, value in changes.items():
        setattr(said, name, value)
    channel.send(stage_pb2.ExecutorMessage(hello=said))
    assert channel.wait(30.0)
    [reply] = channel.receive()
    channel.close()
    context.term()
    return reply.refused.reason


def test_an_executor_hello_is_checked(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert f"the executor {PROTOCOL_VERSION} with 9" in hello(engine, layout_version=9)
    assert f"the executor 9 with {LAYOUT_VERSION}" in hello(engine, protocol_version=9)
    assert hello(engine) == "vocabulary_size: the executor's 0 is below 1"
    one = stage_pb2.ModelFacts(vocabulary_size=9, max_model_len=1, block_size=1, num_blocks=1)
    assert hello(engine, model=one) == "max_model_len: the executor's 1 is below 2"


def test_nonsense_on_every_socket_does_no_harm(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor()
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit([1, 2], 40)
    folder = engine.run_dir.path
    gigabyte = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL".ljust(64, b"\0") + b"\x06\0\0\0\0\x40\0\0\0"
    for junk in (b"\0", os.urandom(3000), b"\x80\x04\x95\x0b\0\0\0", gigabyte, b"x" * 64):
        for name, kind in [
            ("scheduler.zmq", socket.SOCK_STREAM),
            ("executor.zmq", socket.SOCK_STREAM),
            ("executor.fds", socket.SOCK_SEQPACKET),
            ("samplers.sock", socket.SOCK_SEQPACKET),
        ]:
            with socket.socket(socket.AF_UNIX, kind) as raw:
                raw.connect(str(folder / name))
                raw.sendall(junk)
    for frames in ([b"\xff\xff"], [b"", b""], [os.urandom(200)]):
        bad = engine.stranger()
        bad.channel.socket.send_multipart(frames)
        assert refusal(bad) == "malformed message"
    tokenizer.until(lambda: tokenizer.ended(slot))
    assert tokenizer.tokens[slot] == continuation([1, 2], 40)
    engine.until_idle()
    assert engine.stats.executor_ready


def test_a_submit_before_the_hello_is_answered_with_epoch_0(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor()
    engine.tokenizer()
    stranger = engine.stranger(fingerprint="other")
    stranger.until(lambda: stranger.refused)
    stranger.submit([1], 3)
    stranger.until(lambda: stranger.told_to_start_again)
    assert engine.stats.requests_tracked == 0
