"""`triptych health`: asks every process of an engine, or one public address, whether it serves."""

from collections.abc import Collection, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych.services.cli.client import DEFAULT_ADDRESS, describe
from triptych.services.cli.engine import PROCESSES, TOKENIZER
from triptych.services.cli.stage_table import state_and_reason
from triptych.services.runtime.command_line import LineParser
from triptych.services.runtime.lifecycle import EXIT_FAILED, EXIT_OK
from triptych.services.runtime.run_dir import RunDir
from triptych.services.runtime.settings import default_run_dir
from triptych.services.runtime.stage_states import read_states
from triptych.v1 import control_pb2, control_pb2_grpc, inference_pb2

_INFERENCE: str = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_SERVING = "SERVING"
_SUFFIX = ".control.sock"


def run(argv: Sequence[str]) -> int:
    """The body of `triptych health`: 0 when everything serves, else 1. Raises StartupError."""
    parser = LineParser(
        prog="triptych health",
        description="Ask grpc.health.v1 of the public port and of each process's control socket.",
        allow_abbrev=False,
    )
    parser.add_argument("--address", help="public address; default the one the engine reports")
    parser.add_argument("--run-dir", help=f"default {default_run_dir()}")
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds; default 2")
    given = parser.parse(argv)
    results: list[tuple[str, str]] = []
    address = given.address
    # An address alone may be another machine's: then its processes are not ours to ask.
    if given.run_dir is not None or address is None:
        run_dir = RunDir.open(given.run_dir or default_run_dir(), create=False)
        stages = {stage.name: stage for stage in read_states(run_dir).stages}
        for name in process_names(run_dir, stages):
            status = check(f"unix:{run_dir.control_socket(name)}", "", given.timeout)
            if status != _SERVING and name in stages:
                status = f"{status} ({state_and_reason(stages[name])})"
            results.append((name, status))
        address = address or public_address(run_dir, given.timeout) or DEFAULT_ADDRESS
    results += [
        (f"{address} {service or '(server)'}", check(address, service, given.timeout))
        for service in ("", _INFERENCE)
    ]
    width = max(len(what) for what, _ in results)
    for what, status in results:
        print(f"{what:<{width}}  {status}")
    return EXIT_OK if all(status == _SERVING for _, status in results) else EXIT_FAILED


def process_names(run_dir: RunDir, stages: Collection[str] = ()) -> list[str]:
    """The processes that an engine must have, those that its supervisor keeps running, and any
    other that has a control socket."""
    found = {path.name.removesuffix(_SUFFIX) for path in run_dir.path.glob(f"*{_SUFFIX}")}
    return [*PROCESSES, *sorted({*found, *stages} - set(PROCESSES))]


def check(target: str, service: str, timeout: float) -> str:
    """The status of one service of one server, or why there is none."""
    with grpc.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        except grpc.RpcError as error:
            return describe(error)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def public_address(run_dir: RunDir, timeout: float) -> str | None:
    """Where the engine's tokenizer listens; None when it does not answer."""
    with grpc.insecure_channel(f"unix:{run_dir.control_socket(TOKENIZER)}") as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        try:
            return stub.Stats(control_pb2.StatsRequest(), timeout=timeout).tokenizer.address
        except grpc.RpcError:
            return None
