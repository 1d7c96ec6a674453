"""Matrix products of the CPU kernels, against what the machine can do at most.

    make bench-kernels [QUICK=1]

For each instruction set that this machine runs (but plain C++), each weight format, activations in
16 bits and in bytes, and each number of rows M: billions of multiply-adds and of weight bytes per
second, on all cores, threads pinned; the best of many short rounds, as for the limits. The limits
are measured in turn with each product, with the same threads: reading as many bytes as the weights
have (with the kernels' vector loads) and the multiply-add instruction of those activations on
registers alone. One row reads every weight for one multiply-add, so that reading bounds it; many
rows are bound by arithmetic. The figures are fractions of those limits, on SmolLM2's shapes:
`read_...` at M = 1 (target 0.7) and `arithmetic_...` at M = 8 and more (target 0.6).

Of bytes no product comes near the limit: with four products to a lane, the scales of a block take
four instructions for every eight that multiply (three without minimums), so that two thirds is
the most.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triptych.kernels import cpu
from triptych.kernels.cpu import _cpu

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "support")]
from results import Results

from matmul_cases import FORMATS, Weights, aligned_bytes, random_weights

READ_TARGET, ARITHMETIC_TARGET = 0.7, 0.6
WORKING_SET = 192 << 20  # bytes of weights that decoding goes through: beyond L2, as a model's are
# Rounds are short and many: on a machine that does other things too, some run undisturbed.
ROUNDS = 60
ROUND_BYTES = 24 << 20
ROUND_MULTIPLY_ADDS = 6e8
INT8, INT16 = 127, 32767  # largest activation codes


@dataclass(frozen=True)
class Case:
    """A weight matrix [rows, columns] of SmolLM2, or one for another format."""

    name: str
    format: str
    rows: int
    columns: int


SMOLLM = (
    Case("attention", "Q4_1", 576, 576),
    Case("kv", "Q4_1", 192, 576),
    Case("gate_up", "Q4_1", 1536, 576),
    Case("down", "Q4_1", 576, 1536),
    Case("head", "Q8_0", 12288, 576),  # a quarter of its rows: a round has to be short
)
OTHERS = tuple(Case(name, name, 1536, 768) for name in FORMATS if name not in ("Q4_1", "Q8_0"))
QUICK_CASES = (SMOLLM[2], SMOLLM[3], SMOLLM[4])


def copies(weights: Weights, count: int) -> list[tuple[int, int, int, NDArray[np.uint8]]]:
    """`count` copies of the packed matrix, at different addresses."""
    kind, rows, columns, packed = weights.packed
    made = [weights.packed]
    for _ in range(count - 1):
        other = aligned_bytes(packed.size)
        other[:] = packed
        made.append((kind, rows, columns, other))
    return made


def measure(
    case: Case, batches: Sequence[int], cores: list[int], results: Results, limit: int
) -> None:
    """Print a line per number of rows; record the figures of SmolLM2's shapes.

    `limit` is the largest activation code, 127 or 32767.
    """
    rng = np.random.default_rng(0)
    weights = random_weights(rng, case.format, case.rows, case.columns)
    size = weights.packed[3].size
    matrices = copies(weights, max(WORKING_SET // size, 1))
    everything = aligned_bytes(size * len(matrices))
    everything[:] = 1
    isa = cpu.active_isa()
    floats = case.format in ("F32", "F16", "BF16")
    kind = "float32" if floats else "int8" if limit == INT8 else "int16"
    for m in batches:
        x = rng.standard_normal((m, case.columns)).astype(np.float32)
        work = float(m) * case.rows * case.columns
        per_round = max(min(int(ROUND_MULTIPLY_ADDS / work), ROUND_BYTES // size), 1)
        rounds = max(min(ROUNDS, int(20e9 / work / per_round)), 5)
        limit_read = limit_adds = 0.0
        seconds = float("inf")
        for _ in range(3):  # in turn, so that a disturbance does not meet one side alone
            limit_read = max(limit_read, _cpu.read_limit(everything, cores, ROUNDS, ROUND_BYTES))
            limit_adds = max(limit_adds, _cpu.multiply_add_limit(cores, ROUNDS, limit))
            spent = _cpu.time_matmul(matrices, x, cores, rounds, per_round, limit)
            seconds = min(seconds, *spent)
        seconds /= per_round
        adds, read = work / seconds, size / seconds
        of_limit = "" if floats else f" ({adds / limit_adds:4.0%} of {limit_adds / 1e9:5.1f})"
        print(
            f"    {isa:10} {kind:7} {case.format:5} {case.name:10} {case.rows:5}x{case.columns:<4} "
            f"M={m:<4} {adds / 1e9:7.1f} GMAC/s{of_limit} {read / 1e9:6.2f} GB/s "
            f"({read / limit_read:4.0%} of {limit_read / 1e9:.1f})",
            flush=True,
        )
        if case not in SMOLLM:
            continue
        name = f"{isa}_{case.name}_{m}" if limit == INT16 else f"{isa}_int8_{case.name}_{m}"
        if m == 1:
            ratio = read / limit_read
            results.figure(
                f"read_{name}", read / 1e9, limit_read / 1e9, ratio, READ_TARGET,
                ratio >= READ_TARGET,
            )  # fmt: skip
        elif m >= 8:
            ratio = adds / limit_adds
            results.figure(
                f"arithmetic_{name}", adds / 1e9, limit_adds / 1e9, ratio, ARITHMETIC_TARGET,
                ratio >= ARITHMETIC_TARGET,
            )  # fmt: skip


def main() -> int:
    """Run the benchmark; exit code 0 when it ran, whether or not a target is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three shapes, fewer rows: a minute")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    batches = (1, 8, 64) if args.quick else (1, 2, 4, 8, 16, 32, 128, 512)
    results = Results("bench-kernels")
    print(f"    {len(cores)} threads, pinned to cores {cores}", flush=True)
    for isa in cpu.supported_isas()[:-1] or ["scalar"]:
        cpu.select_isa(isa)
        for limit in (INT16, INT8):
            for case in QUICK_CASES if args.quick else SMOLLM:
                measure(case, batches, cores, results, limit)
            for case in () if args.quick else OTHERS:
                if limit == INT16 or case.format not in ("F32", "F16", "BF16"):
                    measure(case, (1, 8, 128), cores, results, limit)
    results.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
