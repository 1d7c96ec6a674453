"""Counters in a file that the processes of bench-frontend share: who has read how much."""

from pathlib import Path

import numpy as np

MAX_READERS = 8


class StreamCounters:
    """u64 in shared memory: the window, then tokens, messages and open streams of each reader.

    Each number has one writer. Reading one while it is written is harmless: it is one machine word.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        shape = 1 + 3 * MAX_READERS
        self._all = np.memmap(path, np.uint64, "w+" if create else "r+", shape=(shape,))
        self._tokens, self._messages, self._open = self._all[1:].reshape(3, MAX_READERS)

    @property
    def window(self) -> int:
        """Steps that may be on their way to the clients at once."""
        return int(self._all[0])

    @window.setter
    def window(self, steps: int) -> None:
        self._all[0] = steps

    def tokens(self) -> int:
        """Read by all clients so far."""
        return int(self._tokens.sum())

    def messages(self) -> int:
        """gRPC messages or events that all clients have read so far."""
        return int(self._messages.sum())

    def open_streams(self) -> int:
        """Streams that have had a token."""
        return int(self._open.sum())

    def add(self, reader: int, tokens: int, messages: int) -> None:
        """Called by that reader alone."""
        self._tokens[reader] += np.uint64(tokens)
        self._messages[reader] += np.uint64(messages)

    def opened(self, reader: int, streams: int) -> None:
        """How many of this reader's streams have had a token; 0 when it goes."""
        self._open[reader] = streams

    def close_all(self) -> None:
        """No reader has an open stream any more."""
        self._open[:] = 0


class Occurrences:
    """Counts a pattern in bytes that come in pieces."""

    def __init__(self, pattern: bytes) -> None:
        self._pattern = pattern
        self._rest = b""

    def count(self, data: bytes) -> int:
        """Those that end in `data`. The pattern must not overlap itself."""
        joined = self._rest + data
        self._rest = joined[len(joined) - len(self._pattern) + 1 :]
        return joined.count(self._pattern)
