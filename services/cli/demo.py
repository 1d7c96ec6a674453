"""`triptych demo`: the whole engine for one answer. Starts it, asks, shows it, stops it."""

import asyncio
import sys
from collections.abc import Sequence

import grpc
from rich.console import Console

from triptych.services.cli.chat import Conversation
from triptych.services.cli.client import Client, describe, print_summary
from triptych.services.cli.engine import TOKENIZER, read_all_stats
from triptych.services.cli.own_folder import own_folder
from triptych.services.cli.panel import Stats, print_panel, print_processes
from triptych.services.cli.serve import serve
from triptych.services.cli.settings import load_engine_settings
from triptych.services.runtime.command_line import LineParser
from triptych.services.runtime.lifecycle import EXIT_FAILED, bind_to_parent, print_error
from triptych.services.runtime.logging import configure_logging
from triptych.services.runtime.run_dir import RunDir
from triptych.v1 import common_pb2

_PROMPT = "What is the capital of France?"
_MAX_TOKENS = 128
_KV_CACHE_MEMORY = "256MiB"  # one answer needs no more, and a laptop keeps its memory
_TIMEOUT = 300.0  # seconds


def run(argv: Sequence[str]) -> int:
    """The body of `triptych demo`: 0 when the answer came. Raises StartupError."""
    parser = LineParser(prog="triptych demo", allow_abbrev=False, add_help=False)
    parser.add_argument("--prompt", default=_PROMPT)
    parser.add_argument("--max-tokens", type=int, default=_MAX_TOKENS)
    given, rest = parser.parse_known_args(argv)
    with own_folder("triptych-demo-") as folder:
        # Beside an engine that runs already. Of two equal flags the first yields.
        own = (
            f"--run-dir={folder.path}",
            "--port=0",
            "--no-http",
            f"--kv-cache-memory={_KV_CACHE_MEMORY}",
        )
        return _demo([*own, *rest], given.prompt, given.max_tokens)


def _demo(argv: Sequence[str], prompt: str, max_tokens: int) -> int:
    settings = load_engine_settings(argv, prog="triptych demo [--prompt TEXT] [--max-tokens N]")
    bind_to_parent(settings.serve.parent_pid)
    configure_logging(settings.serve.log_level, "supervisor")
    run_dir = RunDir.open(settings.serve.run_dir)
    console = Console()
    failed = False

    async def show(stats: Stats, stop: asyncio.Event) -> None:
        nonlocal failed
        print_panel(console, stats, run_dir.path)
        address = stats[TOKENIZER].tokenizer.address
        console.print(f"\n> {prompt}", style="bold", markup=False, highlight=False)
        try:
            await asyncio.to_thread(ask, address, prompt, max_tokens)
        except grpc.RpcError as error:
            print_error("demo", describe(error))
            failed = True
        else:
            console.print()
            print_processes(console, await read_all_stats(run_dir, tuple(stats)), run_dir.path)
            console.print("This engine stops now. `make serve` keeps one up, on 127.0.0.1:50051.")
        stop.set()

    code = serve(settings, show)
    return EXIT_FAILED if failed else code


def ask(address: str, prompt: str, max_tokens: int) -> None:
    """Stream one greedy answer to stdout. Raises grpc.RpcError."""
    params = common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0)
    with Client(address) as client:
        answer = Conversation(client, params, timeout=_TIMEOUT).ask(prompt)
    sys.stdout.flush()
    print_summary(answer)
