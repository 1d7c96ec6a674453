"""A program that draws tokens itself, packet by packet (client/sampler.py hides all of this)."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np

from triptych.engine_core.layout import LAYOUT_VERSION, LogitsLayout
from triptych.engine_core.sampling_params import ExternalSampler
from triptych.services.runtime.run_dir import RunDir
from triptych.services.transport.fd_passing import FdConnection, connect
from triptych.services.transport.rings import LogitsRing, LogitsView
from triptych.v1 import sampler_pb2

Rule = Callable[[LogitsView, sampler_pb2.ReadyRow], int]
"""A token id for logits, float32 [vocabulary], and the row that they are in."""
TIMEOUT = 30.0
LEASE = 0xFEED_5EED_0000_0001


def outside(lease: int = LEASE, tag: int = 0) -> dict[str, Any]:
    """Fields of a request whose tokens the holder of the lease draws."""
    return {"temperature": 1.0, "external": ExternalSampler(lease=lease, tag=tag)}


def by_tag(_logits: LogitsView, row: sampler_pb2.ReadyRow) -> int:
    """Depends on nothing that the model says."""
    return (row.tag + 7 * row.position) % 90


def drawn_by_tag(tag: int, count: int) -> list[int]:
    return [(tag + 7 * position) % 90 for position in range(count)]


def likeliest(logits: LogitsView, _row: sampler_pb2.ReadyRow) -> int:
    return int(np.argmax(logits))


class RawSampler:
    """One connection. What comes without having been waited for is an error of the test."""

    def __init__(self, run_dir: RunDir, timeout: float = TIMEOUT) -> None:
        self.connection = _connected(run_dir, timeout)
        self.offer = sampler_pb2.LeaseOffer()
        self.rows: LogitsRing | None = None
        self.asked: list[sampler_pb2.ReadyRow] = []
        """All rows that ever waited."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.connection.close()
        if self.rows is not None:
            self.rows.close()

    # ------------------------------------------------------------------ packets

    def send(self, message: sampler_pb2.SamplerMessage) -> None:
        self.connection.send_packet(message.SerializeToString())

    def ask(self, lease: int, num_rows: int, layout_version: int = LAYOUT_VERSION) -> None:
        request = sampler_pb2.LeaseRequest(
            layout_version=layout_version, lease=lease, num_rows=num_rows
        )
        self.send(sampler_pb2.SamplerMessage(lease=request))

    def reply(self) -> sampler_pb2.SamplerReply | None:
        """The next packet; None at the end of the connection. Rows that it offers are mapped."""
        received = self.connection.receive_packet_with()
        if received is None:
            return None
        packet, fd = received
        reply = sampler_pb2.SamplerReply.FromString(packet)
        if reply.HasField("offer"):
            assert fd is not None, "rows come with an offer"
            self.offer = reply.offer
            layout = LogitsLayout(reply.offer.num_rows, 1, reply.offer.vocabulary_size)
            self.rows = LogitsRing.attach(fd, layout, reply.offer.epoch)
        else:
            assert fd is None, "a descriptor comes with an offer only"
        return reply

    def claim(self, lease: int, num_rows: int = 8) -> sampler_pb2.LeaseOffer:
        """Get a lease."""
        self.ask(lease, num_rows)
        reply = self.reply()
        assert reply is not None
        assert reply.HasField("offer"), reply
        return reply.offer

    def refused(self, lease: int, num_rows: int, **request: int) -> sampler_pb2.LeaseRefused:
        """Get none; the connection ends behind the word."""
        self.ask(lease, num_rows, **request)
        reply = self.reply()
        assert reply is not None
        assert reply.HasField("refused"), reply
        assert self.reply() is None
        return reply.refused

    def ready(self) -> list[sampler_pb2.ReadyRow]:
        """The next rows that wait. Raises TimeoutError, EOFError."""
        reply = self.reply()
        if reply is None:
            raise EOFError
        assert reply.HasField("ready"), reply
        self.asked += reply.ready.rows
        return list(reply.ready.rows)

    def logits(self, row: sampler_pb2.ReadyRow) -> LogitsView:
        """A copy of what the ticket is about."""
        assert self.rows is not None
        copy: LogitsView = self.rows.rows(row.row, row.ticket, 1)[0].copy()
        return copy

    def draw(self, row: sampler_pb2.ReadyRow, token_id: int) -> None:
        token = sampler_pb2.DrawnToken(row=row.row, ticket=row.ticket, token_id=token_id)
        self.send(sampler_pb2.SamplerMessage(drawn=sampler_pb2.TokensDrawn(tokens=[token])))

    @contextmanager
    def drawing(self, rule: Rule = likeliest) -> Iterator[None]:
        """Draw within it, on a thread, until the connection ends."""
        over = threading.Event()
        errors: list[BaseException] = []

        def run() -> None:
            try:
                self.draw_on(rule, over)
            except BaseException as error:
                errors.append(error)

        self.connection.set_timeout(0.05)
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.connection.set_timeout(TIMEOUT)
        assert not errors, errors

    def draw_on(self, rule: Rule, over: threading.Event) -> None:
        while not over.is_set():
            try:
                for row in self.ready():
                    self.draw(row, rule(self.logits(row), row))
            except TimeoutError:
                continue
            except (EOFError, BrokenPipeError, ConnectionResetError):
                return


def _connected(run_dir: RunDir, timeout: float) -> FdConnection:
    end = time.monotonic() + timeout
    while True:
        try:
            return connect(run_dir.samplers, timeout)
        except BlockingIOError:  # so many connect just now
            assert time.monotonic() < end, "nobody accepts the connection"
            time.sleep(0.001)


def claimed_again(run_dir: RunDir, lease: int, num_rows: int = 8) -> RawSampler:
    """A new connection with the lease, as soon as somebody grants it."""
    end = time.monotonic() + TIMEOUT
    while True:
        assert time.monotonic() < end, "nobody grants the lease"
        try:
            sampler = RawSampler(run_dir)
        except OSError:
            time.sleep(0.01)
            continue
        sampler.ask(lease, num_rows)
        reply = sampler.reply()
        if reply is not None and reply.HasField("offer"):
            return sampler
        sampler.close()
        assert reply is None or reply.refused.retry, reply
        time.sleep(0.01)
