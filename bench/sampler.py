"""Microseconds per row of the C++ sampler, against the same sampling in torch.

    make bench-sampler [QUICK=1]

Vocabularies of 49,152 and 152,064; logits normal with a standard deviation of 2, which spreads the
probability over thousands of tokens. One thread on both sides, 16 rows a call; the figure is the
median of the repeats, ours and the peer's taken in turn. The peer is the method of vLLM's
`forward_native` written in torch: softmax and an exponential race, a k-th value for top_k, a sort
for top_p. It is not vLLM itself, whose CPU build has a fused kernel of its own. Lower is better;
the target is to be no slower. Each ISA of the machine is printed, the best one is the figure.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.kernels import cpu
from triptych.kernels.cpu.sampler import sample
from triptych.kernels.reference.sampler import sample as reference
from triptych.kernels.sample_columns import SampleColumns

sys.path.insert(0, str(Path(__file__).parent))
from results import Results

ROWS = 16
TARGET = 1.0
VOCABULARIES = {"49k": 49152, "152k": 152064}
CASES: dict[str, tuple[float, int, float]] = {  # temperature, top_k, top_p
    "greedy": (0.0, 0, 1.0),
    "temperature": (1.0, 0, 1.0),
    "top_k_50": (1.0, 50, 1.0),
    "top_p_0.9": (1.0, 0, 0.9),
    "top_k_50_top_p_0.9": (1.0, 50, 0.9),
}


def torch_sample(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> object:
    """The same draw in torch; the noise is torch's own."""
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k and top_p == 1.0:
        border = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < border, -torch.inf)
    elif top_p < 1.0:
        ascending, order = logits.sort(dim=-1)
        if top_k:
            ascending[:, :-top_k] = -torch.inf
        drop = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        drop[:, -1] = False
        logits = logits.scatter(-1, order, ascending.masked_fill(drop, -torch.inf))
    probabilities = logits.softmax(dim=-1)
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)


def columns_of(case: tuple[float, int, float], position: int) -> SampleColumns:
    """Settings of one call: every row the same, its own seed."""
    temperature, top_k, top_p = case
    return SampleColumns.of(
        temperature=[temperature] * ROWS,
        top_k=[top_k] * ROWS,
        top_p=[top_p] * ROWS,
        seed=range(ROWS),
        position=[position] * ROWS,
    )


def microseconds(call: Callable[[], object]) -> float:
    """Time of one call, per row."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) / ROWS * 1e6


def measure(
    logits: NDArray[np.float32], case: tuple[float, int, float], repeats: int
) -> tuple[float, float]:
    """Median microseconds per row, ours and torch's."""
    tensor = torch.from_numpy(logits)
    ours, peer = [], []
    for repeat in range(-2, repeats):  # the first two warm up
        columns = columns_of(case, repeat + 2)
        mine = microseconds(partial(sample, logits, columns, logits.shape[1]))
        theirs = microseconds(partial(torch_sample, tensor, *case))
        if repeat >= 0:
            ours.append(mine)
            peer.append(theirs)
    return statistics.median(ours), statistics.median(peer)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    repeats = 9 if parser.parse_args().quick else 41
    torch.set_num_threads(1)
    results = Results("bench-sampler")
    rng = np.random.default_rng(0)
    for label, vocabulary in VOCABULARIES.items():
        logits = (rng.standard_normal((ROWS, vocabulary)) * 2).astype(np.float32)
        for name, case in CASES.items():
            columns = columns_of(case, 0)
            for isa in reversed(cpu.supported_isas()):
                cpu.select_isa(isa)
                if not np.array_equal(
                    sample(logits, columns, vocabulary), reference(logits, columns, vocabulary)
                ):
                    raise SystemExit(f"{name} {label} {isa}: not the reference's tokens")
                ours, peer = measure(logits, case, repeats)
                print(f"  {name} {label} {isa}: {ours:.1f} us per row", flush=True)
            results.figure(
                f"{name}_{label}", ours, peer, ours / peer, TARGET, ours <= TARGET * peer
            )
    results.write()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
