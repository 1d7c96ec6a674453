"""`triptych control`: what an operator asks of a running engine's supervisor."""

import difflib
import math
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from triptych.services.cli.client import describe
from triptych.services.cli.engine import SUPERVISOR
from triptych.services.cli.panel import size
from triptych.services.cli.stage_table import stage_lines
from triptych.services.runtime.command_line import LineParser
from triptych.services.runtime.lifecycle import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_STARTUP,
    StartupError,
    print_error,
)
from triptych.services.runtime.run_dir import RunDir
from triptych.services.runtime.settings import default_run_dir
from triptych.v1 import control_pb2, control_pb2_grpc

_ANSWER_SECONDS = 5.0  # for what is answered from memory
_MOST_SECONDS = 3600.0

Stub = control_pb2_grpc.ControlServiceStub


@dataclass(frozen=True, slots=True)
class _Verb:
    what: str
    more: str
    flags: Callable[[LineParser], None]
    call: Callable[[Stub, Namespace], int]


def run(argv: Sequence[str]) -> int:
    """The body of `triptych control`: 0 when it was done, 1 when it was refused or failed.

    Raises StartupError for a bad command line, and where no engine runs.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return EXIT_OK if argv else EXIT_STARTUP
    name, rest = argv[0], argv[1:]
    verb = _VERBS.get(name)
    if verb is None:
        close = difflib.get_close_matches(name, _VERBS, n=1)
        hint = f"; did you mean {close[0]}?" if close else "; see triptych control --help"
        raise StartupError(f"unknown verb {name!r}{hint}")
    description = f"{verb.what[0].upper()}{verb.what[1:]}. {verb.more}"
    parser = LineParser(
        prog=f"triptych control {name}", description=description, allow_abbrev=False
    )
    verb.flags(parser)
    parser.add_argument("--run-dir", help=f"of the engine; default {default_run_dir()}")
    given = parser.parse(rest)
    run_dir = RunDir.open(given.run_dir or default_run_dir(), create=False)
    if not run_dir.held(SUPERVISOR):
        remedy = "start one with triptych serve, or name its --run-dir"
        raise StartupError(f"no engine runs in {run_dir.path}; {remedy}")
    with grpc.insecure_channel(f"unix:{run_dir.control_socket(SUPERVISOR)}") as channel:
        try:
            return verb.call(control_pb2_grpc.ControlServiceStub(channel), given)
        except grpc.RpcError as error:
            print_error(f"control {name}", describe(error))
            return EXIT_FAILED


def _help() -> str:
    width = max(map(len, _VERBS))
    lines = [f"  {name:<{width}}  {verb.what}" for name, verb in _VERBS.items()]
    return "\n".join(
        [
            "usage: triptych control VERB [--run-dir DIR] [--flags]",
            "",
            "Ask something of a running engine, through its supervisor.",
            "",
            *lines,
            "",
            "A new version of the code: triptych control restart-executor",
            "Another model:             triptych control load-model other.gguf",
            "Before maintenance:        triptych control drain --grace 60",
            "",
            "triptych control VERB --help explains it.",
        ]
    )


# ---------------------------------------------------------------------- flags


def _no_flags(_parser: LineParser) -> None:
    return


def _grace_flag(parser: LineParser) -> None:
    parser.add_argument(
        "--grace",
        type=_seconds,
        metavar="SECONDS",
        help="time that open requests get to end; default the engine's --shutdown-grace",
    )


def _load_flags(parser: LineParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default="",
        metavar="MODEL",
        help="GGUF file, Hugging Face folder or hub id; default the model of before",
    )
    parser.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="name that requests ask for; may be given again; default the file's or folder's",
    )
    _grace_flag(parser)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MOST_SECONDS:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to {_MOST_SECONDS:g}")
    return value


def _grace_ms(given: Namespace) -> int:
    """On the wire 0 is the engine's own."""
    return 0 if given.grace is None else max(1, round(given.grace * 1000))


# ---------------------------------------------------------------------- verbs


def _status(stub: Stub, _given: Namespace) -> int:
    stages = stub.Stats(control_pb2.StatsRequest(), timeout=_ANSWER_SECONDS).supervisor.stages
    for line in stage_lines(stages):
        print(line)
    well = all(stage.state == control_pb2.StageState.STATE_READY for stage in stages)
    return EXIT_OK if well else EXIT_FAILED


def _drain(stub: Stub, given: Namespace) -> int:
    left = stub.Drain(control_pb2.DrainRequest(grace_ms=_grace_ms(given))).requests_running
    print(f"drained, {left} requests are still open" if left else "drained, no request is open")
    return EXIT_FAILED if left else EXIT_OK


def _resume(stub: Stub, _given: Namespace) -> int:
    stub.Resume(control_pb2.ResumeRequest(), timeout=_ANSWER_SECONDS)
    print("requests are taken again")
    return EXIT_OK


def _restart_executor(stub: Stub, _given: Namespace) -> int:
    done = stub.RestartExecutor(control_pb2.RestartExecutorRequest())
    print(f"the executor is process {done.pid} now; streams paused for {done.seconds:.2f} s")
    return EXIT_OK


def _load_model(stub: Stub, given: Namespace) -> int:
    # A path is relative to where it was typed.
    model = str(Path(given.model).absolute()) if Path(given.model).exists() else given.model
    request = control_pb2.LoadModelRequest(
        model=model if given.model else "",
        served_model_names=given.served_model_name,
        grace_ms=_grace_ms(given),
    )
    done = stub.LoadModel(request)
    print(f"{', '.join(done.model_names)} is served, after {done.seconds:.2f} s")
    return EXIT_OK


def _unload_model(stub: Stub, given: Namespace) -> int:
    request = control_pb2.UnloadModelRequest(grace_ms=_grace_ms(given))
    freed = stub.UnloadModel(request).bytes_freed
    print(f"unloaded, {size(freed)} are free again" if freed else "no model is loaded")
    return EXIT_OK


_VERBS = {
    "status": _Verb(
        "show each process's state, and why one does not work",
        "Exit code 1 when one is not ready.",
        _no_flags,
        _status,
    ),
    "drain": _Verb(
        "refuse new requests and wait for the open ones",
        "New requests get UNAVAILABLE (HTTP 503) and health says NOT_SERVING, until triptych "
        "control resume. Exit code 1 when requests are still open after the grace; they go on.",
        _grace_flag,
        _drain,
    ),
    "resume": _Verb("take requests again, after drain", "", _no_flags, _resume),
    "restart-executor": _Verb(
        "start the executor again, with the code and weights that are there now",
        "The step in flight ends first. Running streams pause, and go on where they were; no "
        "request fails. Returns when the new process computes.",
        _no_flags,
        _restart_executor,
    ),
    "load-model": _Verb(
        "serve a model, again or another",
        "Without MODEL, and with the model that is served, it is loaded where it was unloaded. "
        "Another one takes the place of the one that is served: open requests get the grace, the "
        "ports stay. When it cannot be loaded the one before is served again, with exit code 1.",
        _load_flags,
        _load_model,
    ),
    "unload-model": _Verb(
        "end the executor and give its memory back",
        "Open requests get the grace. Then requests are refused, until load-model.",
        _grace_flag,
        _unload_model,
    ),
}
