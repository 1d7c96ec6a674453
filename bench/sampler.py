"""Microseconds per row of the C++ sampler, against torch and against llama.cpp's sampler chain.

    make bench-sampler [QUICK=1]

Vocabularies of 49,152 and 152,064; logits normal with a standard deviation of 2, which spreads the
probability over thousands of tokens; 512 tokens of output for what counts tokens. One thread on all
sides, 16 rows a call. A figure is the median of the repeats, ours and the peers' taken in turn.
`..._torch` is against bench/sampler_torch.py, `..._llama` against bench/lanes/sampler_lane.py,
which counts less than llama.cpp does per row. Lower is better; the target is to be no slower. Each
instruction set of the machine is printed, the best one is the figure.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.kernels import cpu
from triptych.kernels.cpu.sampler import Sampler
from triptych.kernels.reference.sampler import Sampler as PlainSampler
from triptych.kernels.sampler_params import NO_LOGPROBS, SamplerParams, SamplerProtocol

sys.path.insert(0, str(Path(__file__).parent))
from lane import Lane
from results import Results
from sampler_torch import torch_sample

ROWS = 16
HISTORY = 512
TARGET = 1.0
VOCABULARIES = {"49k": 49152, "152k": 152064}
CASES = {
    "greedy": SamplerParams(temperature=0.0),
    "temperature": SamplerParams(temperature=0.8),
    "top_k_50": SamplerParams(top_k=50),
    "top_p_0.9": SamplerParams(top_p=0.9),
    "min_p_0.05": SamplerParams(min_p=0.05),
    "chat": SamplerParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    "typical_p_0.9": SamplerParams(typical_p=0.9),
    "top_n_sigma_1": SamplerParams(top_n_sigma=1.0),
    "penalties": SamplerParams(
        temperature=0.8, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1
    ),
    "logprobs_20": SamplerParams(temperature=0.8, logprobs=20),
}


def opened(
    make: Callable[[int], SamplerProtocol], vocabulary: int, case: SamplerParams, output: list[int]
) -> SamplerProtocol:
    """A sampler with a sequence for each row: the same parameters, its own seed."""
    sampler = make(vocabulary)
    for sequence in range(ROWS):
        sampler.open(sequence, case._replace(seed=sequence), [], output)
    return sampler


def microseconds(call: Callable[[], object]) -> float:
    """Time of one call, per row."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) / ROWS * 1e6


def check(
    lane: Lane, name: str, logits: NDArray[np.float32], case: SamplerParams, output: list[int]
) -> None:
    """Our tokens are the twin's on every instruction set; greedy ones are the peers' too."""
    vocabulary, sequences = logits.shape[1], range(ROWS)
    ours = opened(Sampler, vocabulary, case, output)
    expected = opened(PlainSampler, vocabulary, case, output).draw(logits, sequences, sequences)
    for isa in cpu.supported_isas():
        cpu.select_isa(isa)
        tokens = ours.draw(logits, sequences, sequences).token_ids
        if not np.array_equal(tokens, expected.token_ids):
            raise SystemExit(f"{name} {isa}: not the reference's tokens")
    if case.temperature == 0.0:
        theirs = torch_sample(torch.from_numpy(logits), case, [], output)[0].tolist()
        llama = lane.ask("sample", logits=name, params=case._asdict(), history=output)["tokens"]
        if not expected.token_ids.tolist() == theirs == llama:
            raise SystemExit(f"{name}: not the peers' greedy tokens")


def measure(
    lane: Lane,
    name: str,
    logits: NDArray[np.float32],
    case: SamplerParams,
    output: list[int],
    repeats: int,
) -> tuple[float, float, float]:
    """Median microseconds per row: ours, torch's and llama.cpp's (NaN where it has no like)."""
    tensor, sequences = torch.from_numpy(logits), range(ROWS)
    sampler = opened(Sampler, logits.shape[1], case, output)
    ours, with_torch, with_llama = [], [], []
    for repeat in range(-2, repeats):  # the first two warm up
        mine = microseconds(partial(sampler.draw, logits, sequences, sequences))
        theirs = microseconds(partial(torch_sample, tensor, case, [], output))
        llama = float("nan")
        if case.logprobs == NO_LOGPROBS:
            answer = lane.ask("sample", logits=name, params=case._asdict(), history=output)
            llama = answer["microseconds"]
        if repeat >= 0:
            ours.append(mine)
            with_torch.append(theirs)
            with_llama.append(llama)
    return statistics.median(ours), statistics.median(with_torch), statistics.median(with_llama)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--peer-python", required=True, type=Path, help="has llama-cpp-python")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, the best set only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = Results("bench-sampler")
    rng = np.random.default_rng(0)
    best = cpu.active_isa()
    with (
        tempfile.TemporaryDirectory() as folder,
        Lane(arguments.peer_python, "sampler_lane.py", [folder]) as lane,
    ):
        for label, vocabulary in VOCABULARIES.items():
            logits = (rng.standard_normal((ROWS, vocabulary)) * 2).astype(np.float32)
            np.save(Path(folder) / f"{label}.npy", logits)
            output: list[int] = rng.integers(0, vocabulary, HISTORY).tolist()
            for name, case in CASES.items():
                check(lane, f"{label}.npy", logits, case, output)
                for isa in [best] if arguments.quick else reversed(cpu.supported_isas()):
                    cpu.select_isa(isa)
                    ours, in_torch, in_llama = measure(
                        lane, f"{label}.npy", logits, case, output, 7 if arguments.quick else 21
                    )
                    print(f"  {name} {label} {isa}: {ours:.1f} us per row", flush=True)
                for peer, time_of in (("torch", in_torch), ("llama", in_llama)):
                    if not math.isnan(time_of):
                        met = ours <= TARGET * time_of
                        figure = f"{name}_{label}_{peer}"
                        results.figure(figure, ours, time_of, ours / time_of, TARGET, met)
    results.write()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
