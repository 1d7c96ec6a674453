"""One request from its first attempt to its end: what to send, what is new, whether to try again.

The streams, blocking and asyncio, own the calls and the waiting; all that is decided is here.
"""

import math
import random
import time
from copy import deepcopy
from typing import Generic, TypeVar

from triptych.client.errors import TriptychError, deadline_exceeded
from triptych.client.options import ClientOptions, RetryPolicy
from triptych.client.received import Received, ResponseT
from triptych.client.requests import set_seed
from triptych.v1 import inference_pb2

RequestT = TypeVar("RequestT", bound=inference_pb2.GenerateRequest | inference_pb2.ChatRequest)


class Failures:
    """Failed attempts in a row."""

    def __init__(self, policy: RetryPolicy, deadline: float | None) -> None:
        self._policy = policy
        self._deadline = deadline
        self._count = 0

    def reset(self) -> None:
        """An attempt has brought something."""
        self._count = 0

    def wait_after(self, error: TriptychError) -> float:
        """Seconds to wait before the next attempt. Raises the error where there is none."""
        self._count += 1
        wait = None
        if error.retryable:
            wait = self._policy.wait(self._count, error.retry_after, random.random())
        if wait is None or not self._in_time(wait):
            raise error
        return wait

    def _in_time(self, wait: float) -> bool:
        return self._deadline is None or time.monotonic() + wait < self._deadline


def deadline_of(timeout: float | None) -> float | None:
    """The point in monotonic time that lies so many seconds ahead."""
    return None if timeout is None else time.monotonic() + timeout


def remaining(deadline: float | None) -> float | None:
    """Seconds until a deadline, at least 0."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


class Attempts(Generic[RequestT, ResponseT]):
    """The state of one stream. `request` is changed: give it a copy."""

    def __init__(
        self,
        request: RequestT,
        options: ClientOptions,
        timeout: float | None,
    ) -> None:
        self._request = request
        self._resume = options.resume
        self._began = time.monotonic()
        self.deadline = deadline_of(options.timeout if timeout is None else timeout)
        self._failures = Failures(options.retry, self.deadline)
        self._received: Received[ResponseT] = Received()
        if self._resume:
            set_seed(request)

    @property
    def complete(self) -> bool:
        """Whether the whole answer has been received."""
        return self._received.complete

    def request(self) -> RequestT:
        """What to send next. Raises DeadlineExceeded."""
        if remaining(self.deadline) == 0:
            raise deadline_exceeded()
        spent = math.floor((time.monotonic() - self._began) * 1000)
        sent = deepcopy(self._request)
        if sent.HasField("timeout_ms"):
            # It counts from the arrival of what is sent.
            if spent >= sent.timeout_ms:
                raise deadline_exceeded()
            sent.timeout_ms -= spent
        return sent

    def take(self, response: ResponseT) -> ResponseT | None:
        """What is new of a response; None: nothing. Raises ResumeMismatch."""
        new = self._received.take(response) if self._resume else self._received.pass_on(response)
        if new is not None:
            self._failures.reset()
        return new

    def wait_after(self, error: TriptychError) -> float:
        """After a failed attempt: seconds to wait before the next. Raises the error to give up."""
        if self._received.any and not self._resume:
            raise error
        wait = self._failures.wait_after(error)
        self._received.again()
        return wait
