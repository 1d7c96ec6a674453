"""What happens when more is asked than can be done.

    make bench-overload [QUICK=1]

Starts the whole engine with a short queue (`--max-num-waiting`, below) and asks it, over gRPC, for
answers of a fixed shape: first as many clients at once as it takes in, which ask again as soon as
they are answered (its capacity, and what one waits in a full engine), then at random moments
(Poisson) at 0.5, 1, 2 and 4 times that capacity, whether or not it has answered.

    goodput_N       output tokens/s of whole answers at N times capacity, over that at 1 times
    refusal_p99_N   seconds until a request is refused for want of room (`ours`), over the bound
    accepted_p99_N  seconds from arrival to the last token of an accepted request, p99 (`ours`),
                    over that of the full engine that nobody overloads (`peer`)

Client and engine share the cores: what the client takes to send and to be refused is in all of it.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "support")]
from open_loop import Shape, closed_loop, open_loop
from overload_periods import Period, arrivals
from own_children import exit_on_sigterm
from results import Results
from workload import percentile

from engine import running_engine

SHAPE = Shape(prompt=64, output=32)
LOADS = (0.5, 1.0, 2.0, 4.0)
GOODPUT, REFUSAL, ACCEPTED = 0.9, 0.05, 1.5


def spread(values: Sequence[float]) -> str:
    """Median and p99 in milliseconds."""
    if not values:
        return "none"
    return f"{1e3 * statistics.median(values):.0f} / {1e3 * percentile(values, 0.99):.0f} ms"


def show(name: str, period: Period) -> None:
    """One line: everything that was measured, p50 / p99."""
    accepted = period.accepted
    print(
        f"    {name}: {len(period.calls)} asked, {len(period.refused)} refused in"
        f" {spread([call.over - call.sent for call in period.refused])};"
        f" {period.goodput:.0f} tok/s, {period.goodput / SHAPE.output:.1f} requests/s;"
        f" first token {spread([call.first - call.due for call in accepted])},"
        f" whole answer {spread([call.seconds for call in accepted])};"
        f" sent late {spread([call.sent - call.due for call in period.calls])}",
        flush=True,
    )


async def measure(
    address: str, room: int, seconds: float, seed: int
) -> tuple[Period, dict[float, Period]]:
    """The full engine, and each load."""
    start = time.perf_counter()
    full = Period(await closed_loop(address, room, seconds, SHAPE, f"full {seed}"), start, seconds)
    if full.refused:
        raise RuntimeError(f"{room} clients at once were refused")
    show("full", full)
    capacity = full.goodput / SHAPE.output
    periods = {}
    for load in LOADS:
        moments = arrivals(load * capacity, seconds, random.Random(f"overload {seed} {load}"))
        start = time.perf_counter()
        calls = await open_loop(address, moments, SHAPE, f"open {seed} {load}")
        periods[load] = Period(calls, start, seconds)
        show(f"{load:g}x", periods[load])
    return full, periods


def report(results: Results, full: Period, periods: dict[float, Period]) -> None:
    """The figures."""
    once = periods[1.0].goodput
    full_p99 = percentile([call.seconds for call in full.calls], 0.99)
    for load, period in periods.items():
        over = load > 1
        target = GOODPUT if over else None
        ratio = period.goodput / once
        results.figure(f"goodput_{load:g}", period.goodput, once, ratio, target,
                       not over or ratio >= GOODPUT)  # fmt: skip
        p99 = percentile([call.seconds for call in period.accepted], 0.99)
        ratio = p99 / full_p99
        results.figure(f"accepted_p99_{load:g}", p99, full_p99, ratio, ACCEPTED if over else None,
                       not over or ratio <= ACCEPTED)  # fmt: skip
        if over and period.refused:
            wait = percentile([call.over - call.sent for call in period.refused], 0.99)
            results.figure(f"refusal_p99_{load:g}", wait, REFUSAL, wait / REFUSAL, 1.0,
                           wait <= REFUSAL)  # fmt: skip


def main() -> int:
    """Run the benchmark; exit code 0 when it ran, whether or not a target is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--quick", action="store_true", help="8 seconds for each load, not 25")
    parser.add_argument("--seconds", type=float, help="for each load")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--running", type=int, default=32, help="--max-num-seqs")
    parser.add_argument("--waiting", type=int, default=16, help="--max-num-waiting")
    parser.add_argument("flags", nargs="*", help="more flags of `triptych serve`, behind --")
    args = parser.parse_args()
    exit_on_sigterm()
    seconds = args.seconds or (8.0 if args.quick else 25.0)
    results = Results("bench-overload")
    flags = ["--max-num-seqs", str(args.running), "--max-num-waiting", str(args.waiting)]
    with (
        tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder,
        running_engine(args.model, Path(folder) / "run", *flags, *args.flags) as engine,
    ):
        room = args.running + args.waiting
        full, periods = asyncio.run(measure(engine.address, room, seconds, args.seed))
        report(results, full, periods)
        engine.wait_idle()
    results.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
