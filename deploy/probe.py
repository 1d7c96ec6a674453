#!/opt/triptych/bin/python
"""Asks grpc.health.v1 of a server: exit code 0 when it serves. For container health checks.

    probe.py [--alive] TARGET [SERVICE]

TARGET is what gRPC takes: host:port, or unix:/path of a control socket. With --alive any answer
will do: a process that waits for another one is not to be restarted. Takes 0.2 s.
"""

import sys

import grpc

_SERVING = b"\x08\x01"
_SECONDS = 3.0


def main(arguments: list[str]) -> str | None:
    """What is wrong; None: nothing."""
    alive = "--alive" in arguments
    target, *names = [each for each in arguments if each != "--alive"]
    service = "".join(names).encode()
    # A HealthCheckRequest: field 1, the length (below 128), the name.
    request = b"\n" + bytes([len(service)]) + service if service else b""
    try:
        with grpc.insecure_channel(target) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            answer = check(request, timeout=_SECONDS, wait_for_ready=True)
    except grpc.RpcError as error:
        return f"{target}: {error.code().name}"
    if answer != _SERVING and not alive:
        return f"{target}: NOT_SERVING"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
