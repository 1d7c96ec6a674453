"""Kill everything, again and again, and compare every answer with that of an undisturbed run.

    make chaos [QUICK=1] [SECONDS=600] [SEED=1]

Starts the whole engine on the model file, asks a pool of distinct requests once (through gRPC
Generate, Chat and Session and OpenAI's HTTP; greedy and seeded; with everything that a request can
have) and then lets many clients ask from the pool at the same time, some of which leave, read
slowly, set deadlines or ask for what is refused, while it ends the engine's processes with SIGKILL
at random moments, and stops some with SIGSTOP. Three phases: the executor alone, then the scheduler
too, then all three; between them the engine becomes idle and its figures are compared with those of
the start. bench/README.md says what counts as lost, doubled and changed.

Exit code 1 when a stream was lost, doubled or changed, a process ended by itself, or a figure is
not back. The same seed draws the same requests, clients and kills; their moments are the clock's.
"""

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "support")]
from chaos_clients import Addresses
from chaos_figures import Figures, compare, figures_back, table
from chaos_killer import STAGES, Killer, Watched
from chaos_ledger import Outage
from chaos_load import Load, answer_all, first_answer
from chaos_pauses import Kill
from chaos_report import Report, Seen
from chaos_requests import Ask, draw_pool
from own_children import exit_on_sigterm, free_port
from results import ROOT, Results

from engine import running_engine

POOL = 150
HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT = 0.25, 3.0
PHASES = (
    ("executor", STAGES[:1], 0.25),
    ("scheduler", STAGES[:2], 0.35),
    # Its streams are broken: no more of those than it takes.
    ("tokenizer", (*STAGES, *STAGES[:2]), 0.40),
)
SERVING_IN_SILENCE = HEARTBEAT_TIMEOUT + 2 * HEARTBEAT_INTERVAL
_PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What the command line says."""

    model: Path
    seconds: float
    seed: int
    clients: int
    pool: int
    mean: float
    flags: tuple[str, ...]


@dataclass(slots=True)
class Run:
    """One run: what was asked, killed and heard."""

    setup: Setup
    where: Addresses
    run_dir: Path
    supervisor: int
    seen: Seen = field(default_factory=lambda: Seen(time.perf_counter()))
    watched: Watched = field(init=False)
    pool: list[Ask] = field(init=False)

    def __post_init__(self) -> None:
        self.watched = Watched(self.supervisor)
        self.pool = draw_pool(self.setup.seed, self.setup.pool)

    async def go(self) -> None:
        """The undisturbed run and all phases."""
        start = time.perf_counter()
        self.seen.answers = await answer_all(self.where, self.pool, self.setup.clients)
        await answer_all(
            self.where, self.pool[:20], self.setup.clients
        )  # warm where it comes again
        tokens = sum(each.tokens for each in self.seen.answers.values())
        print(f"    undisturbed: {len(self.pool)} requests, {tokens} tokens,"
              f" {time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip
        watching = [asyncio.create_task(each) for each in (self.watched.run(), self._ask_health())]
        try:
            before = await self._idle("the start", None)
            for name, stages, share in PHASES:
                await self._phase(name, stages, share * self.setup.seconds)
                await self._idle(f"phase {name}", before)
        finally:
            for task in watching:
                task.cancel()
            for task in watching:
                with suppress(asyncio.CancelledError):
                    await task
        self.seen.wrong += [f"ended by itself: {each}" for each in self.watched.unasked]
        self.seen.wrong += [f"process {pid} is left over" for pid in self.watched.left_over()]

    async def _phase(self, name: str, stages: Sequence[str], seconds: float) -> None:
        load = Load(self.where, self.pool, self.setup.seed, self.setup.clients)
        dice = random.Random(f"chaos kills {self.setup.seed} {name}")
        killer = Killer(self.watched, dice, self.setup.mean, self._tokenizer_back, load.pulse.calm)
        stop = asyncio.Event()
        running = asyncio.create_task(load.run(stop, name))
        progress = asyncio.create_task(self._progress(name, load, killer))
        try:
            await asyncio.sleep(1.0)
            await killer.run(stages, time.perf_counter() + seconds - 1.0)
            stop.set()
            await running
        finally:
            progress.cancel()
            running.cancel()
        self.seen.streams += load.done
        self.seen.kills += killer.kills
        self.seen.wrong += [f"the supervisor did not end {each}" for each in killer.stubborn]

    async def _progress(self, name: str, load: Load, killer: Killer) -> None:
        while True:
            await asyncio.sleep(10)
            tokens = sum(each.heard.tokens for each in load.done)
            errors = [each for each in load.done if each.heard.error and not each.ask.refused]
            print(f"    {time.perf_counter() - self.seen.started:4.0f} s, phase {name}:"
                  f" {len(killer.kills)} kills, {len(load.done)} streams,"
                  f" {len(errors)} of them with errors, {tokens} tokens", flush=True)  # fmt: skip

    async def _idle(self, when: str, before: Figures | None) -> Figures:
        found, wrong = await asyncio.to_thread(
            figures_back, self.run_dir, self.supervisor, _PATIENCE
        )
        print(f"    idle after {when}:\n{table(found)}", flush=True)
        self.seen.wrong += [f"after {when}: {each}" for each in wrong]
        if before is not None:
            self.seen.wrong += [f"after {when}: {each}" for each in compare(before, found)]
        return found

    async def _tokenizer_back(self, kill: Kill) -> None:
        """Note the time until its address answers again."""
        probe = next(
            ask for ask in self.pool if ask.door == "grpc" and not ask.chat and not ask.refused
        )
        short = Ask(-1, "grpc", False, probe.prompt, {"max_tokens": 1, "temperature": 0.0})
        back = await first_answer(self.where, short, _PATIENCE * 2)
        if back is None:
            self.seen.wrong.append(
                f"no answer within {_PATIENCE * 2:.0f} s: {kill.line(self.seen.started)}"
            )
            back = time.perf_counter()
        self.seen.outages.append(Outage(kill.when, back))

    async def _ask_health(self) -> None:
        options = [
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 100),
        ]
        request = health_pb2.HealthCheckRequest(service="triptych.v1.InferenceService")
        async with grpc.aio.insecure_channel(self.where.grpc, options=options) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                try:
                    status = (await stub.Check(request, timeout=0.5)).status
                except grpc.aio.AioRpcError:
                    status = health_pb2.HealthCheckResponse.UNKNOWN
                serving = status == health_pb2.HealthCheckResponse.SERVING
                self.seen.health.append((time.perf_counter(), serving))
                await asyncio.sleep(0.1)


def engine_flags(setup: Setup, where: Addresses) -> list[str]:
    """Of `triptych serve`."""
    return [
        "--port", where.grpc.rpartition(":")[2], "--http-port", where.http.rpartition(":")[2],
        # Every kill is an end soon after the one before: all of them together are no crash loop.
        "--max-restarts", "1000", "--restart-window", "0",
        # What is stopped is found soon.
        "--heartbeat-interval", str(HEARTBEAT_INTERVAL),
        "--heartbeat-timeout", str(HEARTBEAT_TIMEOUT),
        # So little that sequences are preempted and cached prefixes evicted.
        "--kv-cache-memory", "128MiB", "--max-model-len", "2048",
        "--max-unread-tokens", "256",
        *setup.flags,
    ]  # fmt: skip


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--quick", action="store_true", help="two minutes")
    parser.add_argument("--seconds", type=float, help="of killing, all phases together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=8, help="streams at once, about")
    parser.add_argument("--pool", type=int, default=POOL, help="distinct requests")
    parser.add_argument("--mean", type=float, default=1.2, help="seconds of calm between two kills")
    parser.add_argument("flags", nargs="*", help="more flags of `triptych serve`, behind --")
    args = parser.parse_args()
    exit_on_sigterm()
    seconds = args.seconds or (120.0 if args.quick else 600.0)
    setup = Setup(
        args.model, seconds, args.seed, args.clients, args.pool, args.mean, tuple(args.flags)
    )
    where = Addresses(f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}")
    results = Results("chaos")
    with tempfile.TemporaryDirectory(prefix="triptych-chaos-") as folder:
        run_dir = Path(folder) / "run"
        try:
            with running_engine(args.model, run_dir, *engine_flags(setup, where)) as engine:
                run = Run(setup, where, run_dir, engine.process.pid)
                uvloop.run(run.go())
        finally:
            log = ROOT / "build" / "results" / "chaos-serve.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(run_dir / "serve.log", log)
    report = Report(run.seen, SERVING_IN_SILENCE)
    report.judge_all()
    report.figures(results, whole=seconds >= 600)
    results.write()
    print(f"    seed {args.seed}; the engine's log is {log.relative_to(ROOT)}", flush=True)
    return 0 if results.met else 1


if __name__ == "__main__":
    sys.exit(main())
