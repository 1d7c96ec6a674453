"""How the ranks of an executor find one another in the run directory.

    rank 0 listens at `executor-group.sock`; the others come: hello
    -> all are there, of one model and with the same settings: welcome, to each
    -> the connections stay (rank_group)

Until the welcome nothing is lost with a rank: one that ended is waited for again, and so is rank 0.
"""

import logging
import os
import secrets
import select
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from triptych.services.executor.backend import BackendOptions
from triptych.services.executor.rank_group import RankGroup, receive, say
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.run_dir import RunDir
from triptych.services.transport import fd_passing
from triptych.services.transport.channel import PROTOCOL_VERSION
from triptych.services.transport.fd_passing import FdConnection, FdListener, OfferError
from triptych.v1 import stage_pb2

MEET_SECONDS = 600.0
"""A rank that is started by hand, or whose files are copied first, may be late."""
_TURN_SECONDS = 0.1
_AGAIN_SECONDS = 0.05
_SEND_SECONDS = 10.0
_MEETING_SUFFIX = ".meeting"

_Peers = dict[int, FdConnection]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Member:
    """One rank, as it presents itself. `settings` must be the same on all ranks."""

    rank: int
    size: int
    fingerprint: str
    settings: Mapping[str, str]

    def hello(self) -> stage_pb2.RankMessage:
        """What it says to rank 0."""
        return stage_pb2.RankMessage(
            hello=stage_pb2.RankHello(
                protocol_version=PROTOCOL_VERSION,
                rank=self.rank,
                tensor_parallel_size=self.size,
                pid=os.getpid(),
                fingerprint=self.fingerprint,
                settings=self.settings,
            )
        )

    def objection(self, hello: stage_pb2.RankHello) -> str | None:
        """Why another rank cannot compute with this one."""
        who = f"rank {hello.rank}"
        if hello.protocol_version != PROTOCOL_VERSION:
            return f"{who} speaks protocol {hello.protocol_version}, rank 0 {PROTOCOL_VERSION}"
        if hello.tensor_parallel_size != self.size:
            return (
                f"tensor_parallel_size: {hello.tensor_parallel_size} of {who}, "
                f"{self.size} of rank 0"
            )
        if not 0 < hello.rank < self.size:
            return f"rank: {hello.rank} is not within 1 and {self.size - 1}"
        if hello.fingerprint != self.fingerprint:
            return (
                f"model: {who} has {hello.fingerprint or 'none'}, rank 0 {self.fingerprint} "
                "(fingerprints of their files)"
            )
        for name in sorted({*self.settings, *hello.settings}):
            ours, other = self.settings.get(name, "unset"), hello.settings.get(name, "unset")
            if ours != other:
                return f"{name}: {other} of {who}, {ours} of rank 0"
        return None


def settings_to_share(options: BackendOptions) -> dict[str, str]:
    """What must be the same on all ranks, of how a model is run. Sizes of memory need not be."""
    names = (
        "device", "dtype", "plan", "max_model_len", "block_size", "kv_cache_dtype",
        "activation_dtype", "quantization", "deterministic", "capture_sizes",
    )  # fmt: skip
    return {name: str(getattr(options, name)) for name in names}


def _refused(reason: str) -> stage_pb2.RankMessage:
    return stage_pb2.RankMessage(refused=stage_pb2.Refused(reason=reason))


def meet(
    run_dir: RunDir,
    name: str,
    member: Member,
    stopping: threading.Event,
    timeout: float = MEET_SECONDS,
) -> RankGroup | None:
    """Wait until all ranks are there; None when `stopping` was set before.

    The role `name` in the run directory must be held. Raises StartupError when the ranks do not fit
    together, and when one has not come within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    turns = _Turns(stopping, deadline)
    if member.rank == 0:
        met = _Host(run_dir, member, timeout).gather(turns)
    else:
        met = _Guest(run_dir, member, timeout).join(turns)
    if met is None:
        return None
    meeting, peers = met
    _log.info("all ranks are there", extra={"ranks": member.size})
    return RankGroup(run_dir, name, (member.rank, member.size), meeting, peers)


@dataclass(frozen=True, slots=True)
class _Turns:
    """Until when to wait."""

    stopping: threading.Event
    deadline: float

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.deadline


class _Host:
    """Rank 0 while the others are missing."""

    def __init__(self, run_dir: RunDir, member: Member, timeout: float) -> None:
        self._run_dir = run_dir
        self._member = member
        self._timeout = timeout
        self._strangers: list[FdConnection] = []
        self._guests: _Peers = {}

    def gather(self, turns: _Turns) -> tuple[str, _Peers] | None:
        for left in self._run_dir.path.glob(f"*{_MEETING_SUFFIX}"):
            left.unlink(missing_ok=True)  # of a rank 0 before us
        path = self._run_dir.executor_group
        try:
            listener = FdListener(path)
        except OSError as error:
            raise StartupError(f"{path}: {error.strerror}; use another --run-dir") from error
        _log.info("waiting for %s", self._missing(), extra={"ranks": self._member.size})
        try:
            while True:
                if turns.stopping.is_set():
                    return None
                if turns.over:
                    raise StartupError(self._late())
                self._turn(listener)
                if len(self._guests) == self._member.size - 1:
                    meeting = f"executor-group-{secrets.token_hex(8)}{_MEETING_SUFFIX}"
                    if self._welcome(meeting):
                        guests, self._guests = self._guests, {}
                        return meeting, guests
        finally:
            listener.close()
            path.unlink(missing_ok=True)
            for connection in (*self._strangers, *self._guests.values()):
                connection.close()

    def _turn(self, listener: FdListener) -> None:
        """Take in who comes, speaks or goes, for a moment."""
        poller = select.poll()
        poller.register(listener.fileno(), select.POLLIN)
        for connection in (*self._strangers, *self._guests.values()):
            poller.register(connection.fileno(), select.POLLIN)
        readable = {fd for fd, _ in poller.poll(_TURN_SECONDS * 1000)}
        for rank, guest in list(self._guests.items()):
            if guest.fileno() in readable:  # it has nothing to say, so it is gone
                self._dismiss(rank, guest)
        for stranger in [each for each in self._strangers if each.fileno() in readable]:
            self._strangers.remove(stranger)
            self._take_in(stranger)
        if listener.fileno() in readable:
            self._accept(listener)

    def _accept(self, listener: FdListener) -> None:
        try:
            connection = listener.accept()
        except OfferError as error:
            _log.warning("ranks' socket: %s", error)
            return
        if connection is not None:
            if len(self._strangers) >= 2 * self._member.size:
                self._strangers.pop(0).close()
            self._strangers.append(connection)

    def _take_in(self, stranger: FdConnection) -> None:
        try:
            message = receive(stranger)
        except (OfferError, DecodeError, OSError) as error:
            _log.warning("ranks' socket: %s", error)
            message = None
        if message is None or not message.HasField("hello"):
            stranger.close()
            return
        hello = message.hello
        reason = self._member.objection(hello)
        if reason is not None:
            _log.error("rank refused: %s", reason, extra={"pid": hello.pid})
            say(stranger, _refused(reason))
            stranger.close()
            return
        if hello.rank in self._guests:  # its process was started again
            self._dismiss(hello.rank, self._guests[hello.rank])
        self._guests[hello.rank] = stranger
        _log.info("rank %d is there", hello.rank, extra={"pid": hello.pid})

    def _dismiss(self, rank: int, guest: FdConnection) -> None:
        _log.warning("rank %d has gone again", rank)
        del self._guests[rank]
        guest.close()

    def _welcome(self, meeting: str) -> bool:
        """Welcome all; False where one has gone meanwhile: those who were welcomed end then."""
        welcome = stage_pb2.RankMessage(welcome=stage_pb2.RankWelcome(meeting=meeting))
        gone = [each for each in self._guests.items() if not say(each[1], welcome)]
        for rank, guest in gone:
            self._dismiss(rank, guest)
        if gone:
            for guest in self._guests.values():
                guest.close()
            self._guests.clear()
        return not gone

    def _missing(self) -> str:
        return ranks_in_words(set(range(1, self._member.size)) - set(self._guests))

    def _late(self) -> str:
        missing = self._missing()
        have = "have" if " and " in missing else "has"
        late = (
            f"{missing} of {self._member.size} {have} not come to {self._run_dir.path} within "
            f"{self._timeout:g} s; each is a process of its own (triptych executor --rank R "
            f"--tensor-parallel-size {self._member.size})"
        )
        for guest in self._guests.values():
            say(guest, _refused(late))
        return late


class _Guest:
    """Another rank, on its way to rank 0."""

    def __init__(self, run_dir: RunDir, member: Member, timeout: float) -> None:
        self._run_dir = run_dir
        self._member = member
        self._timeout = timeout

    def join(self, turns: _Turns) -> tuple[str, _Peers] | None:
        _log.info("waiting for rank 0", extra={"ranks": self._member.size})
        while not turns.stopping.is_set():
            if turns.over:
                raise StartupError(
                    f"rank 0 of {self._member.size} has not come to {self._run_dir.path} within "
                    f"{self._timeout:g} s; it is a process of its own (triptych executor --rank 0 "
                    f"--tensor-parallel-size {self._member.size})"
                )
            connection = self._reach()
            if connection is not None:
                meeting = self._await_welcome(connection, turns)
                if meeting is not None:
                    return meeting, {0: connection}
                connection.close()
            turns.stopping.wait(_AGAIN_SECONDS)
        return None

    def _reach(self) -> FdConnection | None:
        """A connection on which hello was said; None where nobody listens."""
        try:
            connection = fd_passing.connect(self._run_dir.executor_group, _SEND_SECONDS)
        except OSError:
            return None  # it is not there yet, or what is there is of one that was killed
        except OfferError as error:
            raise StartupError(f"{self._run_dir.executor_group}: {error}") from error
        if say(connection, self._member.hello()):
            return connection
        connection.close()
        return None

    def _await_welcome(self, connection: FdConnection, turns: _Turns) -> str | None:
        """Where the collectives meet; None when rank 0 has gone, or it is time to go."""
        poller = select.poll()
        poller.register(connection.fileno(), select.POLLIN)
        while not (turns.stopping.is_set() or turns.over):
            if not poller.poll(_TURN_SECONDS * 1000):
                continue
            try:
                message = receive(connection)
            except (OfferError, DecodeError, OSError) as error:
                _log.warning("rank 0: %s", error)
                return None
            if message is None:
                return None
            if message.HasField("refused"):
                raise StartupError(f"rank 0 refused: {message.refused.reason}")
            if message.HasField("welcome"):
                return _checked(message.welcome.meeting)
        return None


def _checked(meeting: str) -> str:
    """A name of a file, and no path that leads elsewhere."""
    if "/" in meeting or not meeting.endswith(_MEETING_SUFFIX):
        raise StartupError(f"rank 0 names no meeting: {meeting!r}")
    return meeting


def ranks_in_words(ranks: Collection[int]) -> str:
    """As "rank 1", or "ranks 1, 2 and 5"."""
    *most, last = map(str, sorted(ranks))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
