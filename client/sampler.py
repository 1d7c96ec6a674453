"""Tokens drawn by this program, from logits in memory that it shares with the engine."""

import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self, SupportsIndex

from triptych.client.errors import SamplerError, TriptychError
from triptych.client.sampler_link import NotNow, SamplerLink
from triptych.v1 import common_pb2, sampler_pb2

SOCKET_NAME = "samplers.sock"
FIRST_WAIT = 0.02
"""Seconds before a lease is claimed again; each further time after twice as many..."""
LONGEST_WAIT = 0.1
"""... up to so many."""
ANSWER_SECONDS = 10.0
"""For the engine's word on a lease."""


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """What a token is drawn from."""

    logits: "memoryview[float]"
    """Float32, read-only, one for each token id that may be drawn: the model's own. They lie in the
    engine's memory, and are gone when `draw` returns: copy what you keep."""
    tag: int
    """Of the request: that of its `ExternalSampler.params`."""
    position: int
    """Of the token among the request's output tokens, from 0. A request that an engine or a client
    takes up again comes again from an earlier one."""


Draw = Callable[[LogitsRow], SupportsIndex]
"""The id of the token that follows."""


class ExternalSampler:
    """Draws the tokens of some requests in this program, on the machine where the engine runs.

        def draw(row: LogitsRow) -> SupportsIndex:
            return numpy.asarray(row.logits).argmax()

        with ExternalSampler("/run/triptych", draw) as sampler, Client() as client:
            for piece in client.generate("Once", sampler.params(SamplingParams(max_tokens=64))):
                print(piece.text, end="", flush=True)

    `run_dir` is the engine's `--run-dir`; it runs as the same user. Up to `num_rows` requests run
    at once with it; the next is refused (QueueFull), and tried again by the client. Waits up to
    `timeout` seconds for the engine to take it; SamplerError says why it did not.

    `draw` is called in a thread of the sampler's own, for one row after another. If it raises, or
    returns what is no id, the sampler ends: so do its requests, `error` says why, `params` raises
    it, and so does the end of the `with`. An engine that is started again is found again.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        draw: Draw,
        *,
        num_rows: int = 8,
        timeout: float = 10.0,
    ) -> None:
        if num_rows < 1:
            raise ValueError(f"num_rows: {num_rows} is below 1")
        folder = Path(run_dir)
        if not folder.is_dir():
            raise SamplerError(f"{folder} is not a folder: name the engine's --run-dir")
        self._path = folder / SOCKET_NAME
        self._draw = draw
        self._num_rows = num_rows
        self._lease = secrets.randbelow(2**64 - 1) + 1
        self._closed = threading.Event()
        self._lock = threading.Lock()
        """Of `_link`: it is not shut by one thread while another closes it."""
        self._link: SamplerLink | None = None
        self._error: SamplerError | None = None
        self._claim(time.monotonic() + timeout)
        self._thread = threading.Thread(target=self._run, name="triptych-sampler", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """`close`. Raises SamplerError when it had ended, also in place of what a request of its
        ended with."""
        self.close()
        if self._error is None or isinstance(error, SamplerError):
            return
        if error is None or isinstance(error, TriptychError):
            self._raise(self._error)
        error.add_note(str(self._error))

    @property
    def error(self) -> SamplerError | None:
        """Why it has ended before `close`; its cause is what `draw` raised. None: it has not."""
        return self._error

    def params(
        self, params: common_pb2.SamplingParams | None = None, *, tag: int | None = None
    ) -> common_pb2.SamplingParams:
        """A copy of the parameters, for requests whose tokens are drawn here.

        `tag` (u64) tells `draw` which request a row is of; None: a random one. Raises SamplerError
        when the sampler has ended or is closed.
        """
        if tag is not None and not 0 <= tag < 2**64:
            raise ValueError(f"tag: {tag} is no unsigned 64-bit number")
        if self._error is not None:
            self._raise(self._error)
        if self._closed.is_set():
            raise SamplerError("the sampler is closed")
        made = common_pb2.SamplingParams()
        if params is not None:
            made.CopyFrom(params)
        made.external_sampler.lease = self._lease
        made.external_sampler.tag = secrets.randbits(64) if tag is None else tag
        return made

    def close(self) -> None:
        """Give the lease back, which ends requests that still run with it. Waits for a `draw` that
        is under way (but where that is who closes). Nothing when it is closed."""
        self._closed.set()
        with self._lock:
            if self._link is not None:
                self._link.shut()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._link is not None:
                self._serve(self._link)
                self._let_go()
                self._claim(deadline=math.inf)
        except SamplerError as error:
            self._error = error
        except BaseException as error:  # the top of the thread: who asks next is told
            ended = SamplerError(f"draw raised {type(error).__name__}: {error}")
            ended.__cause__ = error
            self._error = ended
        finally:
            self._let_go()

    def _serve(self, link: SamplerLink) -> None:
        """Draw until the connection ends. Raises SamplerError, and whatever `draw` does."""
        while (ready := link.receive()) is not None and not self._closed.is_set():
            if tokens := list(self._drawn(link, ready)):
                link.send(sampler_pb2.TokensDrawn(tokens=tokens))

    def _drawn(
        self, link: SamplerLink, ready: Iterable[sampler_pb2.ReadyRow]
    ) -> Iterable[sampler_pb2.DrawnToken]:
        rows = link.rows
        for each in ready:
            # A row of another ticket, now or after the draw, is that of a request that has ended.
            if rows.ticket(each.row) != each.ticket:
                continue
            token_id = self._drawn_from(LogitsRow(rows.logits(each.row), each.tag, each.position))
            if rows.ticket(each.row) == each.ticket:
                yield sampler_pb2.DrawnToken(row=each.row, ticket=each.ticket, token_id=token_id)

    def _drawn_from(self, row: LogitsRow) -> int:
        limit = len(row.logits)
        try:
            drawn = self._draw(row)
        finally:
            _release(row.logits)
        try:
            token_id = index(drawn)
        except TypeError:
            token_id = -1
        if not 0 <= token_id < limit:
            raise SamplerError(f"draw returned {drawn!r}, no token id from 0 to {limit - 1}")
        return token_id

    def _claim(self, deadline: float) -> None:
        """Connect and have the lease granted; trying until then, or until it is closed.

        Raises SamplerError when it is refused, or not granted before the deadline.
        """
        wait = FIRST_WAIT
        while not self._closed.is_set():
            try:
                self._claim_once(min(ANSWER_SECONDS, max(wait, deadline - time.monotonic())))
            except NotNow as reason:
                self._let_go()
                if time.monotonic() + wait > deadline:
                    raise SamplerError(str(reason)) from reason
            except BaseException:
                self._let_go()
                raise
            else:
                return
            self._closed.wait(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def _claim_once(self, seconds: float) -> None:
        link = SamplerLink(self._path)
        with self._lock:
            self._link = link
        if self._closed.is_set():
            link.shut()  # `close` may have come before there was a link to shut
        link.claim(self._lease, self._num_rows, seconds)

    def _let_go(self) -> None:
        with self._lock:
            link, self._link = self._link, None
            if link is not None:
                link.close()

    def _raise(self, error: SamplerError) -> NoReturn:
        # One instance would gather the tracebacks of all who are told.
        raise SamplerError(str(error)) from error.__cause__


def _release(logits: "memoryview[float]") -> None:
    with suppress(BufferError):  # an array over it lives on; the last one unmaps the memory
        logits.release()
