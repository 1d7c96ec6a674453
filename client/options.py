"""How a client connects, and what it does when a call fails."""

from dataclasses import dataclass, field

import grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a call is tried again: exponential back-off with jitter, never before the engine asked.

    Counted are failures in a row that brought nothing new, so a stream that goes on after a break
    has all its attempts again.
    """

    attempts: int = 8
    """Calls at most, the first one included; 1: none is repeated."""
    first_wait: float = 0.1
    """Seconds before the second attempt; each further one waits twice as long..."""
    longest_wait: float = 5.0
    """... up to so many."""
    longest_retry_after: float = 30.0
    """An engine that asks for more seconds than that is not waited for."""

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.attempts < 1:
            raise ValueError(f"attempts: {self.attempts} is below 1")
        for name in ("first_wait", "longest_wait", "longest_retry_after"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)} is below 0")

    def wait(self, failures: int, retry_after: float | None, jitter: float) -> float | None:
        """Seconds to wait after so many failures in a row (from 1); None: give up.

        `jitter`, from 0 to 1, spreads clients that failed together: the back-off counts by half at
        least, and comes on top of what the engine asked for.
        """
        if failures >= self.attempts or (retry_after or 0.0) > self.longest_retry_after:
            return None
        # Beyond 2^30 the longest wait has long been reached, and floats end somewhere.
        backoff = min(self.longest_wait, self.first_wait * 2.0 ** min(failures - 1, 30))
        return (retry_after or 0.0) + backoff * (0.5 + jitter / 2)


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Everything but the address. The defaults suit an engine on the same machine or network."""

    timeout: float | None = None
    """Deadline in seconds of calls that bring none: all attempts together."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    resume: bool = True
    """Go on with an answer whose connection breaks. Requests without a seed get one."""
    credentials: grpc.ChannelCredentials | None = None
    """`grpc.ssl_channel_credentials(...)` for TLS; None: no encryption."""
    authority: str | None = None
    """The :authority of calls, where a proxy chooses by it."""
    metadata: tuple[tuple[str, str], ...] = ()
    """Sent with every call, such as `authorization`."""
    keepalive_seconds: float = 20.0
    """A connection that is silent for so long is pinged, and broken when that brings nothing."""
    max_message_bytes: int = 16 << 20
    """Largest response that is taken."""
    channel_arguments: tuple[tuple[str, int | str], ...] = ()
    """Further channel arguments of gRPC; they win over those made from the fields above."""

    def arguments(self) -> list[tuple[str, int | str]]:
        """The channel arguments for gRPC."""
        made: dict[str, int | str] = {
            "grpc.keepalive_time_ms": round(self.keepalive_seconds * 1000),
            "grpc.keepalive_timeout_ms": round(self.keepalive_seconds * 1000),
            "grpc.keepalive_permit_without_calls": 0,
            "grpc.http2.max_pings_without_data": 0,
            "grpc.max_receive_message_length": self.max_message_bytes,
            # gRPC's own pace (1 s, then up to 2 minutes) would fail all attempts of one policy.
            "grpc.initial_reconnect_backoff_ms": 100,
            "grpc.min_reconnect_backoff_ms": 1000,
            "grpc.max_reconnect_backoff_ms": 2000,
        }
        if self.authority is not None:
            made["grpc.default_authority"] = self.authority
        return [*(made | dict(self.channel_arguments)).items()]
