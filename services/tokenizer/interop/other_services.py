"""The others' services of the public port; what they need is loaded where one is asked for."""

from collections.abc import Callable
from dataclasses import dataclass

import grpc

from triptych.services.runtime.lifecycle import StartupError
from triptych.services.tokenizer.admission import Admission
from triptych.services.tokenizer.generation import Generation
from triptych.services.tokenizer.interop.engine import Engine
from triptych.services.tokenizer.stats import Counters
from triptych.services.tokenizer.unread_watch import UnreadWatch


@dataclass(frozen=True, slots=True)
class Doors:
    """What every service of the port answers by."""

    generation: Generation
    admission: Admission
    counters: Counters
    unread: UnreadWatch
    engine: Engine


def _add_vllm(server: grpc.aio.Server, doors: Doors) -> None:
    try:
        from smg_grpc_proto.generated import vllm_engine_pb2_grpc
    except ImportError as error:
        raise StartupError(
            f"--vllm-grpc needs a package: pip install 'smg-grpc-proto>=0.4.28,<0.5' ({error})"
        ) from error
    from triptych.services.tokenizer.interop.vllm_engine import VllmEngineServicer

    servicer = VllmEngineServicer(
        doors.generation, doors.admission, doors.counters, doors.unread, doors.engine
    )
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)


def _add_kserve(server: grpc.aio.Server, doors: Doors) -> None:
    from triptych.kserve import inference_pb2_grpc
    from triptych.services.tokenizer.interop.kserve import KServeServicer

    servicer = KServeServicer(
        doors.generation, doors.admission, doors.counters, doors.unread, doors.engine
    )
    inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)


OtherService = tuple[str, Callable[[grpc.aio.Server, Doors], None]]
"""A service's full name, and what adds it; that raises StartupError where its package lacks."""

VLLM: OtherService = ("vllm.grpc.engine.VllmEngine", _add_vllm)
KSERVE: OtherService = ("inference.GRPCInferenceService", _add_kserve)
