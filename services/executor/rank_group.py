"""The ranks of an executor, once they have met (rank_meeting): they end together.

A rank that is gone takes a part of the weights and of the KV cache with it, and the others may hang
for ever in a sum that it does not come to. So a thread watches the connections between them, and
ends this process at the end of a peer, whatever its other threads do. Its exit code, EXIT_GROUP,
says that it is not to blame: it is started again at once, and meets the others anew.

Rank 0 is connected to all others, they to rank 0: the end of one is first its end, then theirs.
"""

import logging
import os
import select
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from google.protobuf.message import DecodeError

from triptych.services.runtime.last_words import leave_words
from triptych.services.runtime.lifecycle import EXIT_FAILED, EXIT_GROUP, EXIT_OK
from triptych.services.runtime.run_dir import RunDir
from triptych.services.transport.fd_passing import FdConnection, OfferError
from triptych.v1 import stage_pb2

_CULPRIT_SECONDS = 1.0  # the end of a peer is seen a moment after what fails because of it
_LEAVE_SECONDS = 1.0  # to end in order, when the others are gone
_BYE_SECONDS = 1.0  # until we are told to stop too, where all are
_BYE = "has stopped"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Session:
    """How far a rank came with the steps of a ring."""

    step_ring: int
    last_step: int


class RankGroup:
    """The connections to the other ranks, all of which were there. Any thread."""

    def __init__(
        self,
        run_dir: RunDir,
        name: str,
        ranks: tuple[int, int],
        meeting: str,
        peers: Mapping[int, FdConnection],
    ) -> None:
        """`ranks`: our own, and how many there are. `meeting` names the file in the run directory
        through which collectives find one another. `peers` are connections by rank, rank 0's to all
        others, or one to rank 0: they are watched from now on, and closed in the end."""
        self.rank, self.size = ranks
        self.meeting: Path = run_dir.path / meeting
        self._run_dir = run_dir
        self._name = name
        self._peers = peers
        self._session = _Session(0, 0)  # ours, that is or was the last
        self._over: dict[int, _Session] = {}  # the last that was over, of each peer
        self._session_lock = threading.Lock()
        self._leaving = threading.Event()
        self._closed = threading.Event()
        self._close_lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._watch, name="rank watch", daemon=True)
        self._thread.start()

    def fail(self, words: str) -> NoReturn:
        """End this process here and now: what it does cannot be done with the others any more.

        Where that comes of a peer's end, it is the peer's: its end is waited for, for a moment.
        """
        if self._leaving.is_set():
            self._end(EXIT_OK, None)
        self._thread.join(_CULPRIT_SECONDS + _BYE_SECONDS)  # it ends the process
        self._end(EXIT_FAILED, words)

    def begin_session(self, step_ring: int) -> Callable[[int], None]:
        """Steps will come through this ring (its inode); to be told of each before it is computed.

        A scheduler may die when it has sent a step to some ranks only: those wait in it for ever,
        while the others join the next scheduler. So ranks tell one another how far they came.
        """
        with self._session_lock:
            self._session = _Session(step_ring, 0)

        def take(step_id: int) -> None:
            with self._session_lock:
                self._session = _Session(step_ring, step_id)
                self._check_steps()

        return take

    def end_session(self) -> None:
        """No more steps come through the ring, and those that came are computed."""
        over = stage_pb2.RankSessionOver(
            step_ring=self._session.step_ring, last_step=self._session.last_step
        )
        self._tell(stage_pb2.RankMessage(session_over=over))

    def leave(self) -> None:
        """This process stops because it was told to: the end of others is no trouble any more."""
        self._leaving.set()

    def close(self) -> None:
        """Say bye, and let go of the others, in the end. Safe to repeat."""
        self.leave()
        with self._close_lock:
            if self._closed.is_set():
                return
            self._tell(stage_pb2.RankMessage(bye=stage_pb2.RankBye()))
            self._closed.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for connection in self._peers.values():
            connection.close()
        os.close(self._wake)
        self.meeting.unlink(missing_ok=True)

    def _watch(self) -> None:
        poller = select.poll()
        ranks = {connection.fileno(): rank for rank, connection in self._peers.items()}
        for fd in (*ranks, self._wake):
            poller.register(fd, select.POLLIN)
        while True:
            for fd in [fd for fd, _ in poller.poll() if fd in ranks]:
                how = self._heard(ranks[fd])
                if how is not None:
                    self._peer_ended(f"rank {ranks[fd]} {how}", bye=how == _BYE)
                    return
            if self._closed.is_set():
                return

    def _heard(self, rank: int) -> str | None:
        """How a peer that has said something, or is gone, ended; None: it has not."""
        try:
            message = receive(self._peers[rank])
        except (BlockingIOError, TimeoutError):
            return None
        except (OfferError, DecodeError, OSError) as error:
            return f"broke off ({error})"
        if message is None:
            return "is gone"
        if message.HasField("session_over"):
            over = message.session_over
            with self._session_lock:
                self._over[rank] = _Session(over.step_ring, over.last_step)
                self._check_steps()
        return _BYE if message.HasField("bye") else None

    def _check_steps(self) -> None:
        """End where a step has come here that will not come to a peer."""
        ours = self._session
        for rank, over in self._over.items():
            if over.step_ring == ours.step_ring and over.last_step < ours.last_step:
                if self._leaving.is_set():
                    self._end(EXIT_OK, None)
                self._end(EXIT_GROUP, f"rank {rank} was not given step {ours.last_step}: ending")

    def _tell(self, message: stage_pb2.RankMessage) -> None:
        for connection in self._peers.values():
            say(connection, message)

    def _peer_ended(self, what: str, *, bye: bool) -> None:
        if not self._leaving.wait(_BYE_SECONDS if bye else 0):
            self._end(EXIT_GROUP, f"{what}: ending")
        if not self._closed.wait(_LEAVE_SECONDS):
            self._end(EXIT_OK, None)  # in a step that the other will not come to

    def _end(self, code: int, words: str | None) -> NoReturn:
        if words is not None:
            (_log.warning if code == EXIT_GROUP else _log.critical)("%s", words)
            leave_words(self._run_dir, self._name, words)
        logging.shutdown()
        os._exit(code)


def receive(connection: FdConnection) -> stage_pb2.RankMessage | None:
    """The next message; None at the end. Raises OfferError, DecodeError, OSError."""
    packet = connection.receive_packet()
    return None if packet is None else stage_pb2.RankMessage.FromString(packet)


def say(connection: FdConnection, message: stage_pb2.RankMessage) -> bool:
    """Send a message; False when the peer is gone."""
    try:
        connection.send_packet(message.SerializeToString())
    except OSError:
        return False
    return True
