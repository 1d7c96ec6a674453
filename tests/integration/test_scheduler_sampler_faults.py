"""Programs that would draw tokens themselves, and ask for what they cannot have, or break their
word. Whoever has nothing to do with it notices nothing."""

import os
import socket
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from fake_executor import (
    NAN_TOKEN,
    VOCABULARY,
    continuation,
)
from raw_sampler import LEASE, TIMEOUT, RawSampler, likeliest, outside
from scheduler_bench import MakeEngine
from triptych.engine_core.errors import InvalidRequest, NotFinite, Unavailable
from triptych.engine_core.layout import LAYOUT_VERSION, LogitsLayout
from triptych.services.scheduler import sampler_link
from triptych.services.transport import fd_passing
from triptych.services.transport.rings import LogitsRing, LogitsView, RingError
from triptych.v1 import sampler_pb2
from undisturbed import all_back, undisturbed

_NOISE = Random(9).randbytes(3000)
_ASKS = sampler_pb2.SamplerMessage(
    lease=sampler_pb2.LeaseRequest(layout_version=LAYOUT_VERSION, lease=5, num_rows=1)
).SerializeToString()


def num_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


# ------------------ no lease


def test_what_is_no_lease(make_engine: MakeEngine) -> None:
    engine = make_engine(sampler_rows=6, heartbeat_timeout=20)

    def refused(lease: int, num_rows: int, **request: int) -> tuple[str, bool]:
        with RawSampler(engine.run_dir) as sampler:
            found = sampler.refused(lease, num_rows, **request)
            return found.reason, found.retry

    assert refused(LEASE, 1) == ("no model is served yet", True)
    engine.executor()
    engine.tokenizer()
    old = LAYOUT_VERSION - 1
    assert refused(LEASE, 1, layout_version=old) == (
        f"layout_version: the rows are of {LAYOUT_VERSION}, not {old}", False
    )  # fmt: skip
    assert refused(0, 1) == ("lease: 0 is none", False)
    bound = "is not within 1 and sampler_rows 6"
    assert refused(LEASE, 0) == (f"num_rows: 0 {bound}", False)
    assert refused(LEASE, 7) == (f"num_rows: 7 {bound}", False)
    with RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE, 4)
        assert refused(LEASE, 1) == (f"lease: {LEASE} is held on another connection", True)
        assert refused(LEASE + 1, 3) == (
            "num_rows: others hold 4 rows of sampler_rows 6, 3 are not left", True
        )  # fmt: skip
        with RawSampler(engine.run_dir) as other:
            other.claim(LEASE + 1, 2)
    with RawSampler(engine.run_dir) as again:
        again.claim(LEASE, 6)
    all_back(engine)


def test_an_engine_without_samplers(make_engine: MakeEngine) -> None:
    engine = make_engine(sampler_rows=0, heartbeat_timeout=20)
    engine.executor()
    engine.tokenizer()
    with RawSampler(engine.run_dir) as sampler:
        assert not sampler.refused(LEASE, 1).retry


def test_the_socket_is_private(make_engine: MakeEngine) -> None:
    engine = make_engine(heartbeat_timeout=20)
    assert engine.run_dir.samplers.stat().st_mode & 0o777 == 0o600


def test_another_user_is_not_heard(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(heartbeat_timeout=20)
    engine.executor()
    tokenizer = engine.tokenizer()
    with undisturbed(engine, tokenizer):
        monkeypatch.setattr(fd_passing, "_peer_uid", lambda _: os.geteuid() + 1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
            raw.connect(str(engine.run_dir.samplers))
            raw.settimeout(TIMEOUT)
            with suppress(ConnectionError):  # of what it had not read
                raw.send(_ASKS)
                assert raw.recv(10) == b""
        monkeypatch.undo()
        with RawSampler(engine.run_dir) as sampler:
            sampler.claim(LEASE)
    all_back(engine)


def test_strangers_do_not_stay(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither many at a time nor for long; they keep nobody out."""
    monkeypatch.setattr(sampler_link, "_STRANGER_SECONDS", 1.0)
    engine = make_engine(heartbeat_timeout=20)
    engine.executor()
    tokenizer = engine.tokenizer()
    with undisturbed(engine, tokenizer):
        pass
    all_back(engine)
    files = num_files()
    with undisturbed(engine, tokenizer):
        strangers = [RawSampler(engine.run_dir) for _ in range(sampler_link.MAX_STRANGERS + 6)]
        for stranger in strangers[:6]:
            assert stranger.reply() is None
        with RawSampler(engine.run_dir) as sampler:
            sampler.claim(LEASE)
        for stranger in strangers[6:]:
            assert stranger.reply() is None
            stranger.close()
        for stranger in strangers[:6]:
            stranger.close()
    all_back(engine)
    engine.until(lambda: num_files() <= files)


def test_no_memory_for_rows(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(heartbeat_timeout=20)
    engine.executor()
    tokenizer = engine.tokenizer()

    def create(layout: LogitsLayout, epoch: int) -> LogitsRing:
        raise RingError(f"cannot create rings of {layout.num_slots} rows in epoch {epoch}")

    with undisturbed(engine, tokenizer):
        monkeypatch.setattr(LogitsRing, "create", create)
        with RawSampler(engine.run_dir) as sampler:
            refused = sampler.refused(LEASE, 63)
        assert refused.reason == "cannot create rings of 63 rows in epoch 77"
        assert refused.retry
        monkeypatch.undo()
        with RawSampler(engine.run_dir) as sampler:
            sampler.claim(LEASE, 63)
    all_back(engine)


def test_programs_that_do_not_stay_for_the_answer(make_engine: MakeEngine) -> None:
    engine = make_engine(heartbeat_timeout=20)
    engine.executor()
    tokenizer = engine.tokenizer()
    with undisturbed(engine, tokenizer):
        for lease in range(1, 40):
            with RawSampler(engine.run_dir) as sampler:
                sampler.ask(lease, 3)
    all_back(engine)
    with RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE, 64)


# ------------------ broken promises


def drawn(row: int, ticket: int = 1, token_id: int = 1) -> bytes:
    tokens = [sampler_pb2.DrawnToken(row=row, ticket=ticket, token_id=token_id)]
    message = sampler_pb2.SamplerMessage(drawn=sampler_pb2.TokensDrawn(tokens=tokens))
    return message.SerializeToString()


@pytest.mark.parametrize("packet", [b"\xff\xff", b"\x12\x09junk", _NOISE, drawn(0)])
def test_noise_in_place_of_a_request(make_engine: MakeEngine, packet: bytes) -> None:
    engine = make_engine(heartbeat_timeout=20)
    engine.executor()
    tokenizer = engine.tokenizer()
    with undisturbed(engine, tokenizer):
        for sent in (packet, packet * 40):
            with RawSampler(engine.run_dir) as sampler:
                sampler.connection.send_packet(sent[: 1 << 16])
                assert sampler.reply() is None
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
            raw.connect(str(engine.run_dir.samplers))
            raw.sendall(packet * (80_000 // len(packet)))
            assert raw.recv(10) == b""
    all_back(engine)


@pytest.mark.parametrize(
    "packet",
    [b"\xff\xff", b"\x1a\0", _NOISE, _ASKS, drawn(3), drawn(0) * 4, b"\x12\0"],
    ids=["junk", "unknown", "noise", "second-request", "unknown-row", "unasked", "nothing"],
)
def test_noise_in_place_of_tokens(make_engine: MakeEngine, packet: bytes) -> None:
    """It is disconnected, and its requests end."""
    engine = make_engine(heartbeat_timeout=20)
    engine.executor()
    tokenizer = engine.tokenizer()
    with undisturbed(engine, tokenizer), RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE, 3)
        slots = [tokenizer.submit([n], 9, **outside()) for n in range(2)]
        while len(sampler.asked) < 2:
            sampler.ready()
        sampler.connection.send_packet(packet)
        tokenizer.until(lambda: tokenizer.ended(*slots))
        for slot in slots:
            assert isinstance(tokenizer.failed[slot], Unavailable)
            assert f"the sampler with the lease {LEASE} is gone: it" in str(tokenizer.failed[slot])
        while (reply := sampler.reply()) is not None:
            assert reply.HasField("ready")
    all_back(engine)


def test_a_token_that_is_none(make_engine: MakeEngine) -> None:
    engine = make_engine(heartbeat_timeout=20)
    engine.executor()
    tokenizer = engine.tokenizer(vocabulary_size=VOCABULARY - 1)

    def rule(logits: LogitsView, row: sampler_pb2.ReadyRow) -> int:
        return VOCABULARY - 1 if (row.tag, row.position) == (1, 2) else likeliest(logits, row)

    with undisturbed(engine, tokenizer), RawSampler(engine.run_dir) as sampler:
        assert sampler.claim(LEASE).sampleable_vocabulary == VOCABULARY - 1
        with sampler.drawing(rule):
            slots = [tokenizer.submit([n], 9, **outside(tag=n)) for n in range(3)]
            tokenizer.until(lambda: tokenizer.ended(*slots))
    wrong = tokenizer.failed.pop(slots[1])
    assert isinstance(wrong, InvalidRequest)
    assert str(wrong) == (
        "external_sampler: its sampler drew token id 96, not below vocabulary_size 96"
    )
    assert not tokenizer.failed
    assert tokenizer.tokens[slots[1]] == continuation([1], 2)
    for n in (0, 2):
        assert tokenizer.tokens[slots[n]] == continuation([n], 9)
    all_back(engine)


def test_old_tickets_are_ignored(make_engine: MakeEngine) -> None:
    """Also the same answer twice, and tickets that never were: as many as it was asked for tokens
    that nobody wants any more."""
    engine = make_engine(heartbeat_timeout=20)
    engine.executor()
    tokenizer = engine.tokenizer()
    with RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE, 1)
        for n in range(6):
            slot = tokenizer.submit([n], 9, **outside())
            sampler.ready()
            tokenizer.abort(slot)
        slot = tokenizer.submit([1, 2], 3, **outside())
        for position in range(3):
            (row,) = sampler.ready()
            assert row.position == position
            assert row.ticket not in {each.ticket for each in sampler.asked[:-1]}
            wrong = sampler_pb2.ReadyRow(row=row.row, ticket=row.ticket + 1)
            sampler.draw([sampler.asked[-2], wrong, sampler.asked[0]][position], 77)
            sampler.draw(row, likeliest(sampler.logits(row), row))
            if position < 2:
                sampler.draw(row, 78)
        tokenizer.until(lambda: tokenizer.ended(slot))
        assert tokenizer.tokens[slot] == continuation([1, 2], 3)
        assert engine.stats.sampler_leases == 1


def test_a_flood_of_answers(make_engine: MakeEngine) -> None:
    """Who says more than it was asked is not listened to."""
    engine = make_engine(heartbeat_timeout=20)
    engine.executor()
    tokenizer = engine.tokenizer()
    with undisturbed(engine, tokenizer), RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE, 3)
        slot = tokenizer.submit([1, 2], 9, **outside())
        (row,) = sampler.ready()
        sampler.draw(row, 5)
        with suppress(ConnectionError):
            for _ in range(10_000):
                sampler.connection.send_packet(drawn(0) * 1000)
        tokenizer.until(lambda: tokenizer.ended(slot))
        assert str(tokenizer.failed[slot]) == (
            f"the sampler with the lease {LEASE} is gone: it answered more often than it was asked"
        )
    all_back(engine)


def test_logits_that_are_not_finite_are_not_drawn_from(make_engine: MakeEngine) -> None:
    engine = make_engine(heartbeat_timeout=20)
    engine.executor()
    tokenizer = engine.tokenizer()
    with undisturbed(engine, tokenizer), RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE)
        with sampler.drawing(lambda _, row: NAN_TOKEN if row.position == 3 else 1):
            slots = [
                tokenizer.submit([NAN_TOKEN], 9, **outside(tag=1)),
                tokenizer.submit([5], 9, **outside(tag=2)),
            ]
            tokenizer.until(lambda: tokenizer.ended(*slots))
    for slot in slots:
        assert isinstance(tokenizer.failed[slot], NotFinite)
    assert tokenizer.tokens[slots[1]] == [1, 1, 1, NAN_TOKEN]
    assert [(row.tag, row.position) for row in sampler.asked] == [(2, n) for n in range(4)]
    all_back(engine)
