"""What `triptych serve` shows once all is ready: what it found, and how to call it."""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.services.cli.engine import EXECUTOR, SCHEDULER, TOKENIZER
from triptych.v1 import control_pb2

if TYPE_CHECKING:  # imported where something is shown: nobody waits for it then
    from rich.console import Console

Stats = Mapping[str, control_pb2.StatsResponse]


def print_panel(console: "Console", stats: Stats, run_dir: Path) -> None:
    """Write the start-up panel."""
    from rich.panel import Panel
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for key, value in panel_facts(stats, run_dir):
        grid.add_row(key, value)
    title = f"triptych {stats[TOKENIZER].process.version} is ready"
    console.print(Panel(grid, title=title, title_align="left", expand=False))
    address = stats[TOKENIZER].tokenizer.address
    for line in how_to_call(address):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def panel_facts(stats: Stats, run_dir: Path) -> list[tuple[str, str]]:
    """The lines of the panel: name and value."""
    executor, scheduler = stats[EXECUTOR].executor, stats[SCHEDULER].scheduler
    tokenizer = stats[TOKENIZER].tokenizer
    context = executor.num_blocks * executor.block_size
    names = ", ".join(tokenizer.model_names)
    return [
        (
            "model",
            names if executor.model in tokenizer.model_names else f"{names} ({executor.model})",
        ),
        (
            "network",
            f"{executor.architecture}, {count(executor.parameters)} parameters, "
            f"vocabulary {executor.vocabulary_size:,}, context {executor.max_model_len:,} tokens",
        ),
        (
            "execution",
            f"{executor.device}{_ranks(executor)}, {executor.dtype}, plan {executor.plan}, "
            f"weights {size(executor.weight_bytes)} loaded in {executor.load_seconds:.1f} s",
        ),
        (
            "KV cache",
            f"{executor.num_blocks:,} blocks x {executor.block_size} tokens = {context:,} tokens, "
            f"{size(executor.kv_cache_bytes)}",
        ),
        (
            "scheduling",
            f"{scheduler.max_num_seqs} sequences, {scheduler.max_num_batched_tokens} tokens a "
            f"step, {scheduler.impl} implementation",
        ),
        ("gRPC", tokenizer.address),
        *([("HTTP", f"http://{tokenizer.http_address}/v1")] if tokenizer.http_address else []),
        ("run dir", str(run_dir)),
        ("processes", ", ".join(f"{name} {each.process.pid}" for name, each in stats.items())),
    ]


def _ranks(executor: control_pb2.ExecutorStats) -> str:
    """Sizes are those of one rank where there are several."""
    ranks = executor.tensor_parallel_size
    return f" x {ranks} ranks (sizes of one)" if ranks > 1 else ""


def how_to_call(address: str) -> list[str]:
    """Lines that a reader can paste into another terminal. Without a bound a small model may write
    until its context is full."""
    few = '"samplingParams":{"maxTokens":100}'
    return [
        "Call it:",
        f"  {as_typed('triptych')} chat --address {address} --max-tokens 100 "
        '"Why is the sky blue?"',
        f"  {as_typed('buf')} curl --protocol grpc --http2-prior-knowledge "
        f'-d \'{{"messages":[{{"role":"user","content":"Hi"}}],{few}}}\' '
        f"http://{address}/triptych.v1.InferenceService/Chat",
        f'  grpcurl -plaintext -d \'{{"text":"Once upon a time",{few}}}\' {address} '
        "triptych.v1.InferenceService/Generate",
    ]


def as_typed(command: str) -> str:
    """The name of a command where a shell finds it, else its path beside our interpreter."""
    beside = Path(sys.executable).parent / command
    if shutil.which(command) or not beside.is_file():
        return command
    return str(beside.relative_to(Path.cwd()) if Path.cwd() in beside.parents[1:] else beside)


def print_processes(console: "Console", stats: Stats, run_dir: Path) -> None:
    """Write the process table: who runs, how large, where it listens."""
    from rich.table import Table

    table = Table(title="Processes", title_justify="left")
    for column in ("pid", "service", "resident", "listens on"):
        table.add_column(column, overflow="fold")
    for name, each in stats.items():
        sockets = sorted(
            path.name for path in run_dir.iterdir() if path.is_socket() and owns(name, path.name)
        )
        if name == TOKENIZER:
            if each.tokenizer.http_address:
                sockets.insert(0, f"{each.tokenizer.http_address} (HTTP, public)")
            sockets.insert(0, f"{each.tokenizer.address} (gRPC, public)")
        table.add_row(
            str(each.process.pid), name, size(each.process.resident_bytes), "\n".join(sockets)
        )
    console.print(table)


def owns(process: str, socket: str) -> bool:
    """Whether a socket file of the run directory is bound by that process."""
    if socket.endswith(".control.sock"):
        return socket == f"{process}.control.sock"
    return process == SCHEDULER  # it binds what the two others connect to


def size(count_of_bytes: int) -> str:
    """Bytes in the largest binary unit that keeps at least one digit before the point."""
    value = float(count_of_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit in ("B", "KiB") else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def count(number: int) -> str:
    """134515008 to 134.5 M."""
    for divisor, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= divisor:
            return f"{number / divisor:.1f} {letter}"
    return str(number)
