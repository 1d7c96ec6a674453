"""Every way in which the core refuses or fails a request.

    RequestError              the request ends; nobody else notices
    |-- InvalidRequest        the caller's fault: a value out of its bound; names all three
    |   `-- TooLong           prompt (and output) can never fit the context or the pool
    |-- UnknownModel          a model that is not served here
    |-- DuplicateId           an id that a running request of the same session has
    |-- NotSupported          the served model cannot do this (chat without a chat template)
    |-- DeadlinePassed        a deadline or time-out of the request passed
    |-- SlowReader            the caller does not read its answer
    |-- NoRoom                no room now; try again later
    |   |-- QueueFull
    |   `-- Unavailable       no executor, or draining
    |-- NotFinite             the model's numbers for one sequence are NaN or infinite
    `-- FatalRequest          executors die computing it

A broken invariant is none of these: it is an AssertionError, and the process dies loudly.
"""

RETRY_AFTER_MS = 1000
"""Hint of a NoRoom whose raiser knows no better: the core has no clock to see how things move."""


class RequestError(Exception):
    """A request that ends without having run, or before its end."""

    @property
    def message(self) -> str:
        """The text for the client."""
        return str(self)


class InvalidRequest(RequestError):
    """A value that the caller must change. `field` is the wire name, dotted."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.description = message


class TooLong(InvalidRequest):
    """Prompt and output can never fit the model's context or the KV pool."""


class UnknownModel(RequestError):
    """The named model is not one of those served."""

    def __init__(self, model: str, served: tuple[str, ...]) -> None:
        super().__init__(f"model: {model[:128]!r} is not served here; served: {', '.join(served)}")
        self.model = model


class DuplicateId(RequestError):
    """The id belongs to a running request of the same session."""


class NotSupported(RequestError):
    """The served model lacks what the request needs."""


class DeadlinePassed(RequestError):
    """A deadline or time-out of the request passed: queued, running, or not submitted yet."""


class SlowReader(RequestError):
    """More of the answer waits for its reader than the settings allow."""


class NoRoom(RequestError):
    """Refused for lack of room; the same request may succeed later."""

    def __init__(self, message: str, retry_after_ms: int = RETRY_AFTER_MS) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class QueueFull(NoRoom):
    """As many requests wait as the settings allow."""


class Unavailable(NoRoom):
    """A stage that the request needs is starting, draining or down."""


class NotFinite(RequestError):
    """The model computed NaN or infinite logits for this sequence."""


class FatalRequest(RequestError):
    """Executors died computing this choice, and nothing else that was suspected."""
