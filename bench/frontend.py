"""What tokenizer processes can push to clients when the engine behind them takes no time.

    make bench-frontend [QUICK=1]

The engine is a stub (instant_scheduler.py) that makes a step as soon as the clients are less than
two steps behind. One and two tokenizer processes serve 1, 32 and 128 streams: gRPC Generate calls,
requests of one Session per process, and server-sent events over HTTP, from clients in processes of
their own (stream_clients.py). First every kind is checked: all streams whole, token for token.

A figure per core is a number of tokens, messages or events over the processor seconds, user and
system, that the tokenizer processes took for them (/proc): on a machine of few cores the clients
and the stub would else be measured too. What passed per second of the clock is printed beside it.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.services.runtime.model_files import resolve_model
from triptych.services.tokenizer.tokenizer import load_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from frontend_servers import START_SECONDS, Server, llama_server, running, tokenizer, until
from machine_load import DISTURBED, Disturbance, cpu_seconds
from results import Results
from stream_clients import WORD
from stream_counters import StreamCounters

KINDS = ("grpc", "session", "sse")
STREAMS = 128  # of the figures with a target
WINDOW = 2


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: so many streams in all, spread over the tokenizer processes."""

    kind: str
    streams: int
    tokenizers: int = 1
    window: int = WINDOW

    def __str__(self) -> str:
        return f"{self.kind:8}{self.streams:4} streams, {self.tokenizers} tokenizer"


@dataclass(frozen=True, slots=True)
class Passed:
    """What passed while it was measured. `others`: part of all cores that strangers took."""

    seconds: float
    cpu_seconds: float
    tokens: int
    messages: int
    others: float

    @property
    def tokens_per_core(self) -> float:
        return self.tokens / self.cpu_seconds

    @property
    def messages_per_core(self) -> float:
        return self.messages / self.cpu_seconds


@dataclass(frozen=True, slots=True)
class Bench:
    """The stub and the tokenizer processes before it."""

    folder: Path
    counters: StreamCounters
    scheduler: int
    tokenizers: Sequence[Server]

    @contextlib.contextmanager
    def clients(
        self, cell: Cell, servers: Sequence[Server], *more: str
    ) -> Iterator[list["subprocess.Popen[bytes]"]]:
        """One client process for each server, with an equal share of the streams."""
        self.counters.window = cell.window
        share = cell.streams // len(servers)
        with contextlib.ExitStack() as stack:
            yield [
                stack.enter_context(
                    running(
                        "stream_clients.py", "--kind", cell.kind, "--streams", str(share),
                        "--address", server.address[cell.kind], "--reader", str(reader),
                        "--counters", str(self.folder / "counters"), *more,
                    )
                )
                for reader, server in enumerate(servers)
            ]  # fmt: skip
        self.counters.close_all()
        until(lambda: not any(server.streams() for server in servers), "all streams have ended")

    def check(self, kind: str) -> None:
        """All streams of a kind come whole. Raises RuntimeError."""
        with self.clients(Cell(kind, STREAMS), self.tokenizers[:1], "--tokens", "200") as processes:
            if any(process.wait(START_SECONDS) for process in processes):
                raise RuntimeError(f"{kind}: streams did not come whole")

    def measure(
        self, cell: Cell, seconds: float, servers: Sequence[Server] | None = None
    ) -> Passed:
        """While all streams of the cell run. `servers`: the cell's tokenizer processes."""
        servers = servers or self.tokenizers[: cell.tokenizers]
        with self.clients(cell, servers) as processes:
            until(lambda: self.counters.open_streams() == cell.streams, f"{cell} runs")
            time.sleep(0.2)
            pids = [server.pid for server in servers]
            begun = self._now(pids)
            with Disturbance([*pids, self.scheduler, *(each.pid for each in processes)]) as others:
                time.sleep(seconds)
            ended = self._now(pids)
        clock, cpu, tokens, messages = (b - a for a, b in zip(begun, ended, strict=True))
        return Passed(clock, cpu, int(tokens), int(messages), others.share)

    def _now(self, pids: Sequence[int]) -> tuple[float, ...]:
        cpu = sum(cpu_seconds(pid) for pid in pids)
        return time.perf_counter(), cpu, self.counters.tokens(), self.counters.messages()


@contextlib.contextmanager
def bench(model: Path, folder: Path, count: int) -> Iterator[Bench]:
    """The stub and `count` tokenizer processes of default settings, on free ports."""
    (token,) = load_tokenizer(resolve_model(str(model))).encode(
        WORD, add_special_tokens=False, parse_special=False
    )
    counters = StreamCounters(folder / "counters", create=True)
    counters.window = WINDOW
    run_dir = folder / "run"
    with contextlib.ExitStack() as stack:
        scheduler = stack.enter_context(
            running(
                "instant_scheduler.py", "--run-dir", str(run_dir), "--token", str(token),
                "--counters", str(folder / "counters"),
            )
        )  # fmt: skip
        tokenizers = [
            stack.enter_context(tokenizer(model, run_dir, f"tokenizer-{index}"))
            for index in range(count)
        ]
        yield Bench(folder, counters, scheduler.pid, tokenizers)


CELLS = [
    Cell(kind, streams, tokenizers)
    for kind in KINDS
    for streams, tokenizers in ((1, 1), (32, 1), (128, 1), (32, 2), (128, 2))
]
PEER_CELL = Cell("sse", 1)  # the peer answers one request at a time
TARGETS: dict[str, tuple[str, Callable[[Passed], float], int]] = {
    "grpc_messages": ("grpc", lambda each: each.messages_per_core, 10_000),
    "session_tokens": ("session", lambda each: each.tokens_per_core, 150_000),
    "sse_events": ("sse", lambda each: each.messages_per_core, 15_000),
}


def show(what: str, passed: Sequence[Passed]) -> None:
    """One line: medians, and the spread of the processor time per token."""
    costs = sorted(1e6 / each.tokens_per_core for each in passed)
    middle = [
        statistics.median(values)
        for values in zip(
            *[
                (
                    each.tokens / each.seconds,
                    each.messages / each.seconds,
                    each.tokens / max(each.messages, 1),
                    each.cpu_seconds / each.seconds,
                    each.others,
                )
                for each in passed
            ],
            strict=True,
        )
    ]
    tokens, messages, per_message, cores, others = middle
    note = f"; others took {others:.0%} of the cores" if others > DISTURBED else ""
    print(
        f"    {what}: {statistics.median(costs):.1f} us/token ({costs[0]:.1f} to {costs[-1]:.1f}),"
        f" {tokens:.0f} tokens/s, {messages:.0f} messages/s of {per_message:.1f} tokens,"
        f" {cores:.2f} cores{note}",
        flush=True,
    )


def main() -> int:
    """Run the benchmark; exit code 0 when it ran, whether or not a target is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--peer-python", type=Path, help="of an environment with llama.cpp")
    parser.add_argument("--quick", action="store_true", help="one round: under three minutes")
    args = parser.parse_args()
    rounds, seconds = (1, 1.5) if args.quick else (3, 2.0)
    passed: dict[Cell, list[Passed]] = {cell: [] for cell in CELLS}
    peer: list[Passed] = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="triptych-bench-"))
        running_bench = stack.enter_context(bench(args.model, Path(folder), count=2))
        peers = [stack.enter_context(llama_server(args.peer_python))] if args.peer_python else []
        for kind in KINDS:
            running_bench.check(kind)
        for _ in range(rounds):
            for cell in CELLS:
                passed[cell].append(running_bench.measure(cell, seconds))
                if peers and cell == PEER_CELL:
                    peer.append(running_bench.measure(cell, seconds, peers))
    for cell in CELLS:
        show(str(cell), passed[cell])
    if peer:
        show("sse        1 stream of llama.cpp's server", peer)
    report(passed, peer)
    return 0


def report(passed: Mapping[Cell, Sequence[Passed]], peer: Sequence[Passed]) -> None:
    """The figures per core, and the file."""
    results = Results("bench-frontend")
    for name, (kind, what, target) in TARGETS.items():
        value = statistics.median(what(each) for each in passed[Cell(kind, STREAMS)])
        results.figure(name, value, target, value / target, 1.0, value >= target)
    if peer:
        ours, theirs = (
            statistics.median(each.messages_per_core for each in values)
            for values in (passed[PEER_CELL], peer)
        )
        results.beside("sse_events_1", ours, theirs)
    results.write()


if __name__ == "__main__":
    sys.exit(main())
