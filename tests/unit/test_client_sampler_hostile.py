"""The client's ExternalSampler against an engine that is none, and what is left behind."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_sampler_engine import (
    EPOCH,
    SECONDS,
    VOCABULARY,
    FakeSamplerEngine,
    argmax,
    broken,
    fake_sampler_engine,
    mapped_rows,
    memory_file,
    offer_of,
    open_files,
    peaked,
)
from triptych.client.api import ExternalSampler, SamplerError
from triptych.engine_core.layout import LogitsLayout
from triptych.v1 import sampler_pb2

LAYOUT = LogitsLayout(num_slots=2, max_logits=1, vocabulary_size=VOCABULARY)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeSamplerEngine]:
    with fake_sampler_engine(tmp_path) as engine:
        yield engine


def test_an_engine_of_another_user_is_refused(
    engine: FakeSamplerEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    uid = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: uid + 1)
    with pytest.raises(SamplerError, match=f"has uid {uid}, not ours"):
        ExternalSampler(tmp_path, argmax)


def changed(offer: sampler_pb2.SamplerReply, **fields: int) -> bytes:
    for name, value in fields.items():
        setattr(offer.offer, name, value)
    return offer.SerializeToString()


OFFER = offer_of(LAYOUT).SerializeToString()
SIZE = LAYOUT.total_bytes


OFFERS: list[tuple[bytes, bytes, int, int | None, str]] = [
    (OFFER, LAYOUT.header(EPOCH), SIZE - 1, None, f"have {SIZE - 1} bytes, expected {SIZE}"),
    (OFFER, LAYOUT.header(EPOCH), SIZE + 4096, None, f"expected {SIZE}"),
    (OFFER, LAYOUT.header(EPOCH), 0, None, f"have 80 bytes, expected {SIZE}"),
    (OFFER, LAYOUT.header(EPOCH), SIZE, 0, "seals are 0x0, 0x7 are required"),
    (OFFER, LAYOUT.header(EPOCH + 1), SIZE, None, "header of the rows is"),
    (OFFER, b"", SIZE, None, "header of the rows is"),
    (changed(offer_of(LAYOUT), num_rows=0), b"", SIZE, None, "offers no rows"),
    (changed(offer_of(LAYOUT), num_rows=3), b"", SIZE, None, f"have {SIZE} bytes"),
    (
        changed(offer_of(LAYOUT), num_rows=2**32 - 1, vocabulary_size=2**32 - 1),
        b"", SIZE, None, f"have {SIZE} bytes",
    ),
    (changed(offer_of(LAYOUT), sampleable_vocabulary=20), b"", SIZE, None, "20 ids of 19"),
    (changed(offer_of(LAYOUT), sampleable_vocabulary=0), b"", SIZE, None, "0 ids of 19"),
    (b"\xff\xff", b"", SIZE, None, "2 bytes that say nothing"),
    (b"\x22\x00", b"", SIZE, None, "nothing that is known here and 1 descriptors"),
    (b"\x1a\x00", b"", SIZE, None, "answers with ready and 1 descriptors"),
    (b"\x00" * 70_000, b"", SIZE, None, "more than 65536 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("packet", "header", "size", "seals", "message"), OFFERS, ids=[each[-1] for each in OFFERS]
)
def test_offers_that_are_none(
    engine: FakeSamplerEngine,
    packet: bytes,
    header: bytes,
    size: int,
    seals: int | None,
    message: str,
) -> None:
    before = open_files(), mapped_rows()
    opening = engine.opening(argmax)
    peer = engine.accept()
    peer.lease()
    fd = memory_file(header, size, *([] if seals is None else [seals]))
    peer.send(packet, fd)
    with pytest.raises(SamplerError, match=message):
        opening.result(SECONDS)
    peer.close()
    assert (open_files(), mapped_rows()) == before


def test_offers_without_their_descriptor(engine: FakeSamplerEngine) -> None:
    for count in (0, 2, 20):
        before = open_files()
        opening = engine.opening(argmax)
        peer = engine.accept()
        peer.lease()
        peer.send(OFFER, *(os.open("/dev/null", os.O_RDONLY) for _ in range(count)))
        with pytest.raises(SamplerError, match="answers with offer and"):
            opening.result(SECONDS)
        peer.close()
        assert open_files() == before, count


@pytest.mark.parametrize("path", ["/dev/null", __file__])
def test_a_descriptor_that_is_no_memory_file(engine: FakeSamplerEngine, path: str) -> None:
    opening = engine.opening(argmax)
    peer = engine.accept()
    peer.lease()
    peer.send(OFFER, os.open(path, os.O_RDONLY))
    with pytest.raises(SamplerError, match=r"not a memory file|cannot carry seals"):
        opening.result(SECONDS)


READY = sampler_pb2.LogitsReady(rows=[sampler_pb2.ReadyRow(row=2)])


@pytest.mark.parametrize(
    ("packet", "message"),
    [
        (OFFER, "says offer, with the lease granted"),
        (b"\xff", "1 bytes that say nothing"),
        (b"\x22\x00", "says nothing that is known here"),
        (b"\x00" * 70_000, "more than 65536 bytes"),
        (sampler_pb2.SamplerReply(ready=READY).SerializeToString(), "names row 2 of 2"),
    ],
)
def test_words_that_no_engine_says(engine: FakeSamplerEngine, packet: bytes, message: str) -> None:
    sampler, peer = engine.opened(argmax)
    peer.send(packet)
    peer.wait_gone()
    with pytest.raises(SamplerError, match=message):
        sampler.params()
    sampler.close()


def test_an_engine_that_sends_descriptors_later_leaves_none_here(
    engine: FakeSamplerEngine,
) -> None:
    sampler, peer = engine.opened(argmax)
    with sampler:
        peer.rows.publish(0, 1, peaked(3))
        ready = sampler_pb2.LogitsReady(rows=[sampler_pb2.ReadyRow(ticket=1)])
        before = open_files()
        peer.send(
            sampler_pb2.SamplerReply(ready=ready).SerializeToString(),
            os.open("/dev/null", os.O_RDONLY),
        )
        assert peer.drawn() == [(0, 1, 3)]
        assert open_files() == before


def test_nothing_is_left(engine: FakeSamplerEngine) -> None:
    """Of restarts, refusals, ends by errors, and closing."""
    before = open_files(), mapped_rows()
    for _ in range(3):
        sampler, peer = engine.opened(argmax)
        with sampler:
            for ticket in range(1, 4):
                peer.rows.publish(0, ticket, peaked(3))
                peer.ready((0, ticket, 0, 0))
                peer.drawn()
                peer.close()
                engine.accept().refuse("later", retry=True)
                peer = engine.accept()
                peer.grant()
    for _ in range(3):
        sampler, peer = engine.opened(broken)
        peer.rows.publish(0, 1, peaked(3))
        peer.ready((0, 1, 0, 0))
        peer.wait_gone()
        sampler.close()
    for peer in engine.peers:
        peer.close()
    assert (open_files(), mapped_rows()) == before
    assert not [each for each in threading.enumerate() if each.name == "triptych-sampler"]
