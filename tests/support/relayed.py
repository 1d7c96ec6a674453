"""What the relays (tests/support/relays) of examples/cpp and examples/go get of an engine."""

import struct
import subprocess

from fake_engine import Request, Response
from triptych.v1 import inference_pb2


def relaying(relay: list[str], address: str, request: Request, *flags: str) -> list[str]:
    """The command of a relay that is given this request, serialized."""
    kind = "chat" if isinstance(request, inference_pb2.ChatRequest) else "generate"
    return [relay[0], address, kind, *relay[1:], *flags]


def relayed(
    relay: list[str], address: str, request: Request, *flags: str
) -> tuple[list[Response], str]:
    """The responses that it got, and the error that it ended with: code, what it was; or ""."""
    done = subprocess.run(
        relaying(relay, address, request, *flags),
        input=request.SerializeToString(),
        capture_output=True,
        timeout=120,
        check=False,
    )
    error = done.stderr.decode()
    assert done.returncode == bool(error), error
    return responses_in(done.stdout, request), error


def responses_in(written: bytes, request: Request) -> list[Response]:
    """All that a relay of this request wrote."""
    chat = isinstance(request, inference_pb2.ChatRequest)
    kind = inference_pb2.ChatResponse if chat else inference_pb2.GenerateResponse
    responses: list[Response] = []
    while written:
        (length,) = struct.unpack_from("<I", written)
        responses.append(kind.FromString(written[4 : 4 + length]))
        written = written[4 + length :]
    return responses
