"""The checker's program: StructuredOutput messages in, grammars or refusals out, one at a time.

`python -m triptych.services.tokenizer.grammar_checker_child SECONDS BYTES`. Frames on stdin and
stdout are a u32 length, little-endian, and so many bytes; an empty one says that it is ready. It
ends with its stdin, and at the latest so many seconds after a message came: whatever happens to the
tokenizer process, nothing stays behind.
"""

import json
import os
import resource
import signal
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.structured_output.wanted import wanted_grammar
from triptych.v1 import common_pb2

_LENGTH = struct.Struct("<I")
_STACK_BYTES = 2 << 20
"""A quarter of a thread's as a rule: a recursion that ends here does not end the scheduler."""


def main(argv: list[str]) -> int:
    """Serve until the end of stdin. Returns the exit code."""
    seconds, memory_bytes = float(argv[0]), int(argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tokenizer's to act on
    _limit_memory(memory_bytes)
    # Only frames may reach the pipe: whatever a library prints goes elsewhere.
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    threading.stack_size(_STACK_BYTES)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_serve, replies, seconds).result()
    return 0


def _serve(replies: BinaryIO, seconds: float) -> None:
    _write(replies, b"")
    while (message := _read(sys.stdin.buffer)) is not None:
        # No handler: the signal ends the process, also in the middle of native code.
        signal.setitimer(signal.ITIMER_REAL, seconds)
        reply = _reply(message)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(replies, json.dumps(reply).encode())


def _reply(message: bytes) -> dict[str, str]:
    try:
        raw = common_pb2.StructuredOutput.FromString(message)
        return {"grammar": wanted_grammar(raw)}
    except InvalidRequest as error:
        return {"field": error.field, "refusal": error.description}
    except MemoryError:
        raise  # of no use any more: the process is replaced
    except Exception as error:  # the top of the process: a bug is the tokenizer's to report
        return {"bug": f"{type(error).__name__}: {error}"}


def _limit_memory(memory_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    data = stream.read(size)
    return data if len(data) == size else None


def _write(stream: BinaryIO, data: bytes) -> None:
    rest = memoryview(_LENGTH.pack(len(data)) + data)
    while rest:
        rest = rest[stream.write(rest) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
