"""What the engine adds to the model: time per output token over the executor's own step time.

    make bench-overhead [QUICK=1]

Starts the whole engine on the model file, opens 1 and then 16 streams that decode at the same time
(ignore_eos, so that no stream ends early) and compares, over the window in which all of them run,

    the median time per output token, as the client sees it on its gRPC stream
    the executor's own step time (median of the same window's steps)

Also prints the microseconds of a step that each part takes: plan, write_inputs, the two hops,
sample, apply, emit (scheduler) and drain (tokenizer process). The prompts share a beginning, which
the prefix cache answers; nothing is measured before all streams decode. Lower is better; the
figures are `itl_over_step_1` (target 1.15) and `itl_over_step_16` (target 1.3).
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from triptych.v1 import common_pb2, control_pb2, inference_pb2

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "support")]
from results import Results

from engine import Engine, running_engine

TARGETS = {1: 1.15, 16: 1.3}
PROMPT = "Write a long story about a lighthouse keeper who"


@dataclass
class Stream:
    """Arrival time and cumulative token count of each message of one stream."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    error: Exception | None = None


def read_stream(engine: Engine, index: int, tokens: int, stream: Stream) -> None:
    """Drain one Generate call, noting when each message came."""
    request = inference_pb2.GenerateRequest(
        text=f"{PROMPT} saw {index} ships.",
        sampling_params=common_pb2.SamplingParams(
            max_tokens=tokens, temperature=1.0, seed=index, ignore_eos=True
        ),
    )
    try:
        total = 0
        for response in engine.stub.Generate(request, timeout=600):
            total += len(response.token_ids)
            stream.times.append(time.perf_counter())
            stream.counts.append(total)
    except Exception as error:  # the process's top of this thread; reported by the caller
        stream.error = error


def token_gaps(stream: Stream, start: float, end: float) -> list[float]:
    """Seconds per token inside [start, end]; a message of k tokens gives k equal gaps."""
    gaps: list[float] = []
    for i in range(1, len(stream.times)):
        new = stream.counts[i] - stream.counts[i - 1]
        if new > 0 and stream.times[i - 1] >= start and stream.times[i] <= end:
            gaps += [(stream.times[i] - stream.times[i - 1]) / new] * new
    return gaps


def step_parts(
    before: control_pb2.StatsResponse, after: control_pb2.StatsResponse
) -> dict[str, float]:
    """Mean microseconds per step of each part of the scheduler's step."""
    steps = max(after.scheduler.steps_total - before.scheduler.steps_total, 1)
    names = ("plan", "write_inputs", "hops", "execute", "sample", "apply", "emit")
    return {
        name: 1e6
        * (getattr(after.scheduler.step_times, name) - getattr(before.scheduler.step_times, name))
        / steps
        for name in names
    }


def measure(engine: Engine, streams: int, tokens: int) -> tuple[float, float, dict[str, float]]:
    """Median seconds per token at the client, median step seconds, microseconds of each part."""
    results = [Stream() for _ in range(streams)]
    threads = [
        threading.Thread(target=read_stream, args=(engine, i, tokens, results[i]))
        for i in range(streams)
    ]
    for thread in threads:
        thread.start()
    while not all(r.counts and r.counts[-1] >= 4 for r in results):  # every stream decodes
        if any(r.error for r in results):
            break
        time.sleep(0.01)
    start = time.perf_counter()
    before, tokenizer_before = engine.stats("scheduler"), engine.stats("tokenizer-0").tokenizer
    while all(not r.counts or r.counts[-1] < tokens - 4 for r in results):
        if any(r.error for r in results):
            break
        time.sleep(0.01)
    end = time.perf_counter()
    after, tokenizer_after = engine.stats("scheduler"), engine.stats("tokenizer-0").tokenizer
    recent = engine.stats("executor-0").executor.recent_step_seconds
    steps = after.scheduler.steps_total - before.scheduler.steps_total
    step_seconds = statistics.median(recent[-max(steps, 1) :])
    for thread in threads:
        thread.join()
    for result in results:
        if result.error is not None:
            raise result.error
    parts = step_parts(before, after)
    drains = max(tokenizer_after.drains_total - tokenizer_before.drains_total, 1)
    parts["drain"] = (
        1e6 * (tokenizer_after.drain_seconds_total - tokenizer_before.drain_seconds_total) / drains
    )
    gaps = [gap for result in results for gap in token_gaps(result, start, end)]
    return statistics.median(gaps), step_seconds, parts


def main() -> int:
    """Run the benchmark; exit code 0 when it ran, whether or not a target is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer tokens: under three minutes")
    args = parser.parse_args()
    tokens = 64 if args.quick else 160
    results = Results("bench-overhead")
    with (
        tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder,
        running_engine(args.model, Path(folder) / "run") as engine,
    ):
        engine.generate(PROMPT, max_tokens=8, temperature=0.0)  # warm up
        for streams, target in TARGETS.items():
            itl, step, parts = measure(engine, streams, tokens)
            ratio = itl / step
            results.figure(f"itl_over_step_{streams}", itl, step, ratio, target, ratio <= target)
            line = "  ".join(f"{name} {value:.0f}" for name, value in parts.items())
            print(f"    {streams} streams, us per step: {line}", flush=True)
        engine.wait_idle()
    results.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
