"""Microseconds of the scheduler's core for one step, C++ batch against plain Python batch.

    make bench-core [QUICK=1]

1, 32, 256 and 1024 sequences run, all of them decoding, with prompts of 16 to 512 tokens, so that
in each step as many fill a block as in service; prefix cache on, and nobody ends. Timed is all that
the scheduler's loop asks of the core for a step: plan, write (into a ring of two slots), samples,
scores and apply. Tokens are drawn beforehand. First, both batches run the same steps and must write
the same bytes and answer the same.

`core_N_us`: p50 over the steps under one and the same Scheduler, ours with the C++ batch, the peer
with the Python batch; the target is for ours, in microseconds. `core_growth`: ours for a sequence,
among 1024 against among 256; growth is linear at 1.
"""

import argparse
import random
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import cast

from triptych.engine_core.admission import Limits
from triptych.engine_core.batch import Batch
from triptych.engine_core.ids import RequestId
from triptych.engine_core.layout import StepLayout
from triptych.engine_core.python_batch import PythonBatch
from triptych.engine_core.request import Request
from triptych.engine_core.sampling import NoSampling
from triptych.engine_core.sampling_params import SamplingParams
from triptych.engine_core.scheduler import Scheduler
from triptych.engine_core.step import StepOutput, StepPlan, StepResult
from triptych.kernels.core import Batch as NativeBatch

sys.path.insert(0, str(Path(__file__).parent))
from results import Results
from workload import percentile

BLOCK_SIZE = 16
VOCABULARY = 49152
MAX_LEN = 2048
MAX_PROMPT = 512
BUDGET = 8192
STOP = 0  # as an end-of-sequence id, never drawn
TARGETS_US = {1: 100.0, 32: 100.0, 256: 100.0, 1024: 400.0}
GROWTH_TARGET = 1.0
BatchFactory = Callable[[int, int, StepLayout, bool], Batch]


class Core:
    """A Scheduler over a batch, all of whose sequences decode."""

    def __init__(self, new_batch: BatchFactory, size: int) -> None:
        layout = StepLayout(
            num_slots=2,
            max_tokens=BUDGET,
            max_rows=size,
            max_blocks_per_row=MAX_LEN // BLOCK_SIZE,
            max_logits=size,
        )
        limits = Limits(
            max_model_len=MAX_LEN,
            max_num_seqs=size,
            max_num_batched_tokens=BUDGET,
            max_num_waiting=0,
            vocabulary_size=VOCABULARY,
            sampleable_vocabulary=VOCABULARY,
            max_num_logits=size,
        )
        batch = new_batch(size * layout.max_blocks_per_row, BLOCK_SIZE, layout, True)
        self.scheduler = Scheduler(limits, batch, NoSampling())
        self.slots = [memoryview(bytearray(layout.slot_bytes)) for _ in range(layout.num_slots)]
        self.size = size
        self._rng = random.Random(size)
        for number in range(size):
            self._submit(number)
        while self.step(self.draw())[0].num_samples < size:
            pass

    def _submit(self, number: int) -> None:
        length = self._rng.randint(16, MAX_PROMPT)
        prompt = tuple(self._rng.choices(range(VOCABULARY), k=length))
        params = SamplingParams(max_tokens=MAX_LEN - length, stop_token_ids=(STOP,))
        self.scheduler.submit(Request(RequestId(number), prompt, params))

    def draw(self) -> "array[int]":
        """A token for every sequence."""
        return array("i", self._rng.choices(range(STOP + 1, VOCABULARY), k=self.size))

    def step(self, drawn: "array[int]") -> tuple[StepPlan, StepOutput, int]:
        """One step; what it was, what it meant, and the nanoseconds that it took."""
        scheduler = self.scheduler
        begin = time.perf_counter_ns()
        plan = scheduler.plan()
        scheduler.write(plan, self.slots[plan.step_id % len(self.slots)])
        sequence_ids, _ = scheduler.samples()
        scheduler.scores()
        between = time.perf_counter_ns()
        result = StepResult(plan.step_id, drawn[: len(sequence_ids)])
        resumed = time.perf_counter_ns()
        output = scheduler.apply(result)
        end = time.perf_counter_ns()
        return plan, output, end - resumed + between - begin

    def times(self, steps: int) -> list[float]:
        """Microseconds of each step."""
        drawn = [self.draw() for _ in range(steps)]
        return [self.step(tokens)[2] / 1e3 for tokens in drawn]


def check(native: Core, python: Core, steps: int) -> None:
    """Both take the same steps, and what they write and answer is the same."""
    for _ in range(steps):
        drawn = native.draw()
        assert drawn == python.draw(), "both draw the same"
        ours, theirs = native.step(drawn), python.step(drawn)
        assert ours[:2] == theirs[:2], "the batches differ in a plan or an output"
        for mine, other in zip(native.slots, python.slots, strict=True):
            assert mine == other, "the batches wrote different bytes"


def measure(size: int, *, quick: bool) -> tuple[float, float]:
    """p50 of the core with either batch, in microseconds."""
    native = Core(cast(BatchFactory, NativeBatch), size)
    python = Core(PythonBatch, size)
    check(native, python, 3 if quick else 10)
    peer = python.times(min(1000, max(10, (500 if quick else 2000) // size)))
    ours = native.times(200 if quick else 1000)
    for name, times in (("native", ours), ("python", peer)):
        p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
        print(f"{size:5} sequences, {name}: p50 {p50:9.1f} us  p99 {p99:9.1f} us", flush=True)
    return percentile(ours, 0.5), percentile(peer, 0.5)


def main() -> int:
    """Run the benchmark; exit code 0 when it ran, whether or not a target is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps: a minute")
    args = parser.parse_args()
    results = Results("bench-core")
    found = {}
    for size, target in TARGETS_US.items():
        ours, peer = found[size] = measure(size, quick=args.quick)
        results.figure(f"core_{size}_us", ours, peer, ours / peer, target, ours < target)
    large, small = found[1024][0] / 1024, found[256][0] / 256
    ratio = large / small
    results.figure("core_growth", large, small, ratio, GROWTH_TARGET, ratio <= GROWTH_TARGET)
    results.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
