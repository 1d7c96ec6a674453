"""The client's ExternalSampler against a scripted engine: params and draws."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fake_sampler_engine import (
    EPOCH,
    SAMPLEABLE,
    SECONDS,
    FakeSamplerEngine,
    Peer,
    argmax,
    fake_sampler_engine,
    mapped_rows,
    peaked,
)
from triptych.client import logits_rows
from triptych.client.api import (
    Client,
    LogitsRow,
    SamplerError,
    SamplingParams,
)
from triptych.engine_core import layout
from triptych.engine_core.layout import LogitsLayout
from triptych.v1 import common_pb2, sampler_pb2


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeSamplerEngine]:
    with fake_sampler_engine(tmp_path) as engine:
        yield engine


def test_the_layout_is_the_engine_s() -> None:
    assert logits_rows.LAYOUT_VERSION == layout.LAYOUT_VERSION
    assert logits_rows.SLOT_HEADER.format == layout.LOGITS_HEADER.format
    for rows, vocabulary in ((1, 1), (3, 16), (8, 17), (64, 128_256)):
        ring = LogitsLayout(num_slots=rows, max_logits=1, vocabulary_size=vocabulary)
        offer = sampler_pb2.LeaseOffer(num_rows=rows, vocabulary_size=vocabulary, epoch=EPOCH)
        assert logits_rows.ring_header(offer) == ring.header(EPOCH)
        assert logits_rows.slot_bytes(vocabulary) == ring.slot_bytes


def test_tokens_are_drawn_from_the_rows_that_are_ready(engine: FakeSamplerEngine) -> None:
    seen: list[tuple[int, int, list[float]]] = []

    def draw(row: LogitsRow) -> int:
        seen.append((row.tag, row.position, [*row.logits]))
        assert row.logits.readonly
        assert row.logits.format == "f"
        return argmax(row)

    sampler, peer = engine.opened(draw)
    with sampler:
        peer.rows.publish(0, 7, peaked(18, 3))  # 18 is not to be drawn
        peer.rows.publish(1, 2**64 - 1, peaked(0))
        peer.ready((1, 2**64 - 1, 2**64 - 2, 5), (0, 7, 1, 0))
        assert peer.drawn() == [(1, 2**64 - 1, 0), (0, 7, 3)]
        peer.rows.publish(0, 8, peaked(15))
        peer.ready((0, 8, 1, 1))
        assert peer.drawn() == [(0, 8, 15)]
    assert [(tag, position) for tag, position, _ in seen] == [(2**64 - 2, 5), (1, 0), (1, 1)]
    assert seen[1][2] == peaked(18, 3)[:SAMPLEABLE]
    assert sampler.error is None


def test_numpy_reads_in_place_and_its_integers_count(engine: FakeSamplerEngine) -> None:
    def draw(row: LogitsRow) -> np.integer:
        array = np.asarray(row.logits)
        assert array.dtype == np.float32
        assert not array.flags.owndata
        return array.argmax()

    sampler, peer = engine.opened(draw)
    with sampler:
        peer.rows.publish(0, 1, peaked(11))
        peer.ready((0, 1, 0, 0))
        assert peer.drawn() == [(0, 1, 11)]


def test_params_are_a_copy_that_names_the_lease(engine: FakeSamplerEngine) -> None:
    opening = engine.opening(argmax, num_rows=5)
    lease = engine.accept().grant()
    assert lease.layout_version == layout.LAYOUT_VERSION
    assert lease.num_rows == 5
    assert lease.lease
    with opening.result(SECONDS) as sampler:
        own = SamplingParams(max_tokens=3, stop=["x"])
        made = sampler.params(own, tag=9)
        assert made.external_sampler == common_pb2.ExternalSampler(lease=lease.lease, tag=9)
        assert not own.HasField("external_sampler")
        made.ClearField("external_sampler")
        assert made == own
        tags = {sampler.params().external_sampler.tag for _ in range(20)}
        assert len(tags) == 20
        with pytest.raises(ValueError, match="tag: 18446744073709551616"):
            sampler.params(tag=2**64)
    with pytest.raises(SamplerError, match="the sampler is closed"):
        sampler.params()


def test_two_samplers_have_leases_of_their_own(engine: FakeSamplerEngine) -> None:
    openings = [engine.opening(argmax) for _ in range(2)]
    assert len({engine.accept().grant().lease for _ in openings}) == 2
    for opening in openings:
        opening.result(SECONDS).close()


def test_a_row_of_another_request_is_not_answered(engine: FakeSamplerEngine) -> None:
    """Its request ended; the row is another one's before the draw, or meanwhile."""
    peers: list[Peer] = []
    drawn: list[int] = []

    def draw(row: LogitsRow) -> int:
        drawn.append(row.tag)
        if row.tag == 2:
            peers[0].rows.publish(1, 31, peaked(5))
        return argmax(row)

    sampler, peer = engine.opened(draw)
    with sampler:
        peers.append(peer)
        peer.rows.publish(0, 11, peaked(3))
        peer.rows.publish(1, 30, peaked(4))
        peer.ready((0, 10, 1, 0))
        peer.ready((1, 30, 2, 0), (0, 11, 3, 0))
        assert peer.drawn() == [(0, 11, 3)]
        peer.ready((1, 31, 4, 0))
        assert peer.drawn() == [(1, 31, 5)]
    assert drawn == [2, 3, 4]


def test_views_are_gone_after_the_draw(engine: FakeSamplerEngine) -> None:
    kept: list[memoryview[float]] = []

    def draw(row: LogitsRow) -> int:
        kept.append(row.logits)
        return 1

    sampler, peer = engine.opened(draw)
    with sampler:
        peer.rows.publish(0, 1, peaked(3))
        peer.ready((0, 1, 0, 0))
        peer.drawn()
    with pytest.raises(ValueError, match="released"):
        kept[0][0]


def test_an_array_that_is_kept_outlives_the_sampler(engine: FakeSamplerEngine) -> None:
    kept = []

    def draw(row: LogitsRow) -> int:
        kept.append(np.asarray(row.logits))
        return 1

    before = mapped_rows()
    sampler, peer = engine.opened(draw)
    with sampler:
        peer.rows.publish(0, 1, peaked(3))
        peer.ready((0, 1, 0, 0))
        peer.drawn()
    engine.stop()
    assert mapped_rows() == before + 1
    assert int(kept[0].argmax()) == 3
    kept.clear()
    assert mapped_rows() == before


def test_a_client_is_not_needed_to_make_params(engine: FakeSamplerEngine) -> None:
    """But its calls take them."""
    sampler, _ = engine.opened(argmax)
    with sampler, Client("127.0.0.1:1") as client:
        stream = client.generate("x", sampler.params(SamplingParams(max_tokens=1)))
        stream.cancel()
