"""The client's ExternalSampler against a scripted engine: how it begins, goes on and ends."""

import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from fake_sampler_engine import (
    SAMPLEABLE,
    SECONDS,
    Broken,
    FakeSamplerEngine,
    argmax,
    broken,
    fake_sampler_engine,
    peaked,
)
from triptych.client import sampler as sampler_module
from triptych.client.api import (
    ExternalSampler,
    LogitsRow,
    SamplerError,
    TriptychError,
    Unavailable,
)
from triptych.client.sampler_link import SamplerLink


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeSamplerEngine]:
    with fake_sampler_engine(tmp_path) as engine:
        yield engine


def test_a_draw_that_raises_ends_the_sampler(engine: FakeSamplerEngine) -> None:
    sampler, peer = engine.opened(broken)
    peer.rows.publish(0, 1, peaked(3))
    peer.ready((0, 1, 0, 6))
    peer.wait_gone()
    for _ in range(2):
        with pytest.raises(SamplerError, match="draw raised Broken: cannot draw 6") as caught:
            sampler.params()
        assert isinstance(caught.value.__cause__, Broken)
    assert isinstance(sampler.error, TriptychError)
    sampler.close()
    sampler.close()
    with pytest.raises(SamplerError, match="cannot draw 6"):
        sampler.params()


def test_the_end_of_the_with_says_why_it_ended(engine: FakeSamplerEngine) -> None:
    def leave(error: Exception | None) -> None:
        sampler, peer = engine.opened(broken)
        with sampler:
            peer.rows.publish(0, 1, peaked(3))
            peer.ready((0, 1, 0, 6))
            peer.wait_gone()
            if error is not None:
                raise error

    with pytest.raises(SamplerError, match="cannot draw 6"):
        leave(None)
    gone = Unavailable("the sampler is gone", grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(SamplerError, match="cannot draw 6") as caught:
        leave(gone)
    assert caught.value.__context__ is gone
    with pytest.raises(KeyError) as other:
        leave(KeyError("of the program"))
    assert other.value.__notes__ == ["draw raised Broken: cannot draw 6"]


def test_its_own_error_leaves_the_with_once(engine: FakeSamplerEngine) -> None:
    sampler, peer = engine.opened(broken)

    def ask() -> None:
        with sampler:
            peer.rows.publish(0, 1, peaked(3))
            peer.ready((0, 1, 0, 6))
            peer.wait_gone()
            sampler.params()

    with pytest.raises(SamplerError, match="cannot draw 6") as caught:
        ask()
    assert caught.value.__context__ is None


@pytest.mark.parametrize("token", [-1, SAMPLEABLE, 2**40, 1.0, None, "3"])
def test_what_is_no_id_ends_the_sampler(engine: FakeSamplerEngine, token: Any) -> None:
    sampler, peer = engine.opened(lambda row: token)
    peer.rows.publish(0, 1, peaked(3))
    peer.ready((0, 1, 0, 0))
    peer.wait_gone()
    with pytest.raises(SamplerError, match=f"draw returned {token!r}, no token id from 0 to 15"):
        sampler.params()
    sampler.close()


def test_close_waits_for_the_draw_and_comes_from_anywhere(engine: FakeSamplerEngine) -> None:
    began, go_on = threading.Event(), threading.Event()
    ended: list[bool] = []

    def draw(row: LogitsRow) -> int:
        began.set()
        assert go_on.wait(SECONDS)
        ended.append(True)
        return 0

    sampler, peer = engine.opened(draw)
    peer.rows.publish(0, 1, peaked(3))
    peer.ready((0, 1, 0, 0))
    assert began.wait(SECONDS)
    closing = threading.Thread(target=sampler.close)
    closing.start()
    peer.wait_gone()  # at once, so that its requests end
    assert not ended
    go_on.set()
    closing.join(SECONDS)
    assert ended
    assert sampler.error is None


def test_a_draw_may_close_its_sampler(engine: FakeSamplerEngine) -> None:
    made: list[ExternalSampler] = []

    def draw(row: LogitsRow) -> int:
        made[0].close()
        return 0

    sampler, peer = engine.opened(draw)
    made.append(sampler)
    peer.rows.publish(0, 1, peaked(3))
    peer.ready((0, 1, 0, 0))
    peer.wait_gone()
    sampler.close()
    assert sampler.error is None


def test_a_restarted_engine_is_found_again(engine: FakeSamplerEngine) -> None:
    positions: SimpleQueue[int] = SimpleQueue()

    def draw(row: LogitsRow) -> int:
        positions.put(row.position)
        return argmax(row)

    opening = engine.opening(draw)
    peer = engine.accept()
    lease = peer.grant()
    with opening.result(SECONDS) as sampler:
        peer.rows.publish(0, 3, peaked(4))
        peer.ready((0, 3, 1, 8))
        peer.drawn()
        engine.stop()
        assert sampler.params().external_sampler.lease == lease.lease
        engine.start()
        engine.accept().close()  # it is not up yet
        engine.accept().refuse("no model is loaded", retry=True)
        peer = engine.accept()
        assert peer.grant(vocabulary=12) == lease  # with another model, too
        peer.rows.publish(1, 3, [*range(12)])
        peer.ready((1, 3, 1, 7))
        assert peer.drawn() == [(1, 3, 11)]
        assert sampler.error is None
    assert [positions.get_nowait() for _ in range(2)] == [8, 7]


def test_an_engine_that_refuses_for_good_ends_it(engine: FakeSamplerEngine) -> None:
    sampler, peer = engine.opened(argmax)
    peer.close()
    refusing = engine.accept()
    refusing.refuse("--sampler-rows is 0", retry=False)
    sampler._thread.join(SECONDS)
    with pytest.raises(SamplerError, match="refuses the lease: --sampler-rows is 0"):
        sampler.params()
    sampler.close()


def test_close_ends_the_search_for_an_engine(engine: FakeSamplerEngine) -> None:
    sampler, peer = engine.opened(argmax)
    engine.stop()
    sampler.close()
    assert sampler.error is None
    engine.start()
    sampler, peer = engine.opened(argmax)
    peer.close()
    engine.accept().lease()  # no answer comes
    sampler.close()
    assert sampler.error is None


def test_close_is_noticed_by_a_connection_that_is_just_made(
    engine: FakeSamplerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected, go_on = threading.Event(), threading.Event()

    class Late(SamplerLink):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            connected.set()
            assert go_on.wait(SECONDS)

    sampler, peer = engine.opened(argmax)
    monkeypatch.setattr(sampler_module, "SamplerLink", Late)
    monkeypatch.setattr(sampler_module, "ANSWER_SECONDS", 4 * SECONDS)
    peer.close()
    assert connected.wait(SECONDS)
    closing = threading.Thread(target=sampler.close)
    closing.start()
    assert sampler._closed.wait(SECONDS)
    with sampler._lock:  # `close` has looked for a link to shut, or will
        go_on.set()
    closing.join(SECONDS)
    assert not closing.is_alive()


def test_the_search_gives_the_processor_a_rest(engine: FakeSamplerEngine) -> None:
    class Closed(threading.Event):
        def __init__(self) -> None:
            super().__init__()
            self.waits: list[float | None] = []

        def wait(self, timeout: float | None = None) -> bool:
            self.waits.append(timeout)
            if len(self.waits) == 6:
                self.set()
            return super().wait(0)

    sampler, _ = engine.opened(argmax)
    closed = sampler._closed = Closed()
    engine.stop()
    sampler._thread.join(SECONDS)
    assert closed.waits == [0.02, 0.04, 0.08, 0.1, 0.1, 0.1]


def test_an_idle_sampler_waits_without_an_end(engine: FakeSamplerEngine) -> None:
    sampler, _ = engine.opened(argmax)
    with sampler:
        assert sampler._link is not None
        assert sampler._link._socket.gettimeout() is None


def test_it_waits_for_the_engine_to_take_it(engine: FakeSamplerEngine) -> None:
    engine.stop()
    opening = engine.opening(argmax)
    engine.start()
    engine.accept().refuse("others hold the rows", retry=True)
    engine.accept().grant()
    opening.result(SECONDS).close()


def test_an_engine_that_does_not_take_it(
    engine: FakeSamplerEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = engine.opening(argmax)
    engine.accept().refuse("rows: 2 of 1", retry=False)
    with pytest.raises(SamplerError, match="refuses the lease: rows: 2 of 1"):
        opening.result(SECONDS)
    monkeypatch.setattr(sampler_module, "FIRST_WAIT", 2 * SECONDS)  # longer than it may take
    opening = engine.opening(argmax)
    engine.accept().refuse("no model is loaded", retry=True)
    with pytest.raises(SamplerError, match="for now: no model is loaded"):
        opening.result(SECONDS)
    monkeypatch.undo()
    with pytest.raises(SamplerError, match="has no word on the lease: timed out"):
        ExternalSampler(tmp_path, argmax, timeout=0)
    engine.accept().lease()
    engine.stop()
    with pytest.raises(SamplerError, match=r"nothing listens on .*samplers.sock: Connection ref"):
        ExternalSampler(tmp_path, argmax, timeout=0)
    with pytest.raises(SamplerError, match=r"is not a folder: name the engine's --run-dir"):
        ExternalSampler(tmp_path / "elsewhere", argmax)
    long = tmp_path / ("x" * 100)
    long.mkdir()
    with pytest.raises(SamplerError, match="too long"):
        ExternalSampler(long, argmax)
    with pytest.raises(ValueError, match="num_rows: 0"):
        ExternalSampler(tmp_path, argmax, num_rows=0)
