"""`triptych doctor`: checks what an engine needs, then makes one real generation."""

import asyncio
from collections.abc import Callable, Sequence

import grpc
from pydantic import Field
from rich.console import Console

from triptych.services.cli import doctor_checks as checks
from triptych.services.cli.client import Answer, Client, describe, read_stream
from triptych.services.cli.doctor_checks import Finding, guarded
from triptych.services.cli.doctor_gpu import gpu
from triptych.services.cli.engine import TOKENIZER
from triptych.services.cli.own_folder import own_folder
from triptych.services.cli.panel import Stats
from triptych.services.cli.serve import serve
from triptych.services.cli.settings import load_engine_settings
from triptych.services.runtime.lifecycle import EXIT_FAILED, EXIT_OK, StartupError
from triptych.services.runtime.logging import configure_logging
from triptych.services.runtime.settings import Settings, flag, load_settings
from triptych.v1 import common_pb2, inference_pb2

_KV_CACHE_MEMORY = "64MiB"  # room for one short sequence of any model of a laptop's size
_TIMEOUT = 120.0  # seconds
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


class DoctorSettings(Settings):
    """What doctor is told; the other keys of file and environment go into its generation."""

    model: str | None = Field(
        default=None,
        min_length=1,
        description="GGUF file, Hugging Face folder, or hub id (org/name)",
        json_schema_extra=flag("Model", default="none: no generation"),
    )
    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="address to try the port on",
        json_schema_extra=flag("Public endpoint"),
    )
    port: int = Field(
        default=50051,
        ge=0,
        le=65535,
        description="port to try",
        json_schema_extra=flag("Public endpoint"),
    )


def run(argv: Sequence[str]) -> int:
    """The body of `triptych doctor`: 1 when anything fails, else 0. Raises StartupError."""
    settings = load_settings(DoctorSettings, argv, prog="triptych doctor")
    configure_logging("warning", "doctor")
    console = Console()
    failed = False
    for what, check in _plan(settings, argv):
        finding = guarded(what, check)
        failed = failed or finding.state == "fail"
        show(console, finding)
    return EXIT_FAILED if failed else EXIT_OK


def show(console: Console, finding: Finding) -> None:
    """Write a finding: its line, and what to do about it."""
    console.print(f"{finding.state:<5}", style=_STYLES[finding.state], end="")
    text = f"{finding.what:<15} {finding.detail}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    if finding.remedy:
        console.print(f"      -> {finding.remedy}", markup=False, highlight=False, soft_wrap=True)


def _plan(settings: DoctorSettings, argv: Sequence[str]) -> list[tuple[str, Callable[[], Finding]]]:
    model = settings.model
    plan: list[tuple[str, Callable[[], Finding]]] = [
        ("python", checks.python),
        ("packages", checks.dependencies),
        ("native modules", checks.native_modules),
        ("instructions", checks.instruction_sets),
        ("shared memory", checks.shared_memory),
        ("memory", checks.memory_and_cores),
        ("gpu", gpu),
        ("port", lambda: checks.port(settings.host, settings.port)),
        ("run directory", lambda: checks.run_directory(settings.run_dir)),
        ("engine", lambda: checks.engine(settings.run_dir)),
    ]
    if model is None:
        remedy = "give --model to check its files and make one generation"
        return [*plan, ("generation", lambda: Finding("generation", "warn", "skipped", remedy))]
    return [
        *plan,
        ("model files", lambda: checks.model_files(model)),
        ("generation", lambda: generation(argv)),
    ]


def generation(argv: Sequence[str]) -> Finding:
    """Start a whole engine beside any that runs, and let it complete one prompt."""
    remedy = "start triptych serve with the same flags and read its log"
    answers: list[Answer] = []

    async def ask(stats: Stats, stop: asyncio.Event) -> None:
        answers.append(await asyncio.to_thread(_ask, stats[TOKENIZER].tokenizer.address))
        stop.set()

    with own_folder("triptych-doctor-") as folder:
        own = [
            f"--run-dir={folder.path}",
            "--port=0",
            "--host=127.0.0.1",
            "--no-http",
            "--log-level=warning",
        ]
        try:
            argv = [f"--kv-cache-memory={_KV_CACHE_MEMORY}", *argv, *own]
            code = serve(load_engine_settings(argv, prog="triptych doctor"), ask)
        except (StartupError, grpc.RpcError) as error:
            said = describe(error) if isinstance(error, grpc.RpcError) else str(error)
            return Finding("generation", "fail", said, remedy)
    if not answers:
        return Finding("generation", "fail", f"the engine ended with code {code}", remedy)
    return Finding("generation", "ok", answers[0].summary())


def _ask(address: str) -> Answer:
    """One greedy completion. Raises grpc.RpcError."""
    request = inference_pb2.GenerateRequest(
        text="The capital of France is",
        sampling_params=common_pb2.SamplingParams(max_tokens=8, temperature=0.0),
    )
    with Client(address) as client:
        return read_stream(client.generate(request, _TIMEOUT))
