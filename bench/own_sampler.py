"""What it costs when a program on the same machine draws the tokens (sampler.proto), per token.

    make bench-own-sampler [QUICK=1]

1 and 8 requests at once, on one Session, whose tokens a program draws that takes the most likely
(examples/cpp/own_sampler; Python: client/sampler.py with numpy's argmax), by turns with the same
requests drawn greedily by the engine; every pair must bring the same tokens. Client and sampler are
one process, as in a service that does so, and share the machine's cores with the engine.

    LANGUAGE_MODEL_N    us per token of a stream from its first token on, N streams; peer: built-in

A step brings a token to each stream: N tokens are drawn in that time. MODEL is `tiny` (random, 320
token ids: the way alone) or `real` (the model file's: its rows of logits are copied and read).
Medians over the pairs; what a program adds is the median of the pairs' differences. No target.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from triptych.client.api import ExternalSampler, LogitsRow
from triptych.v1 import common_pb2, inference_pb2

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "support")]
from machine_load import DISTURBED, Disturbance
from results import ROOT, Results

from engine import Engine, generate_request, running_engine
from small_engines import SMALL, tiny_model

STREAMS = (1, 8)
CPP_TOOLS = ("g++", "cmake", "protoc", "grpc_cpp_plugin")
TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class Case:
    """Pairs of so many tokens in each of so many streams."""

    streams: int
    tokens: int
    pairs: int


@dataclass(frozen=True, slots=True)
class Costs:
    """Microseconds per token of a stream: built-in, drawn by a program, and the difference within a
    pair; medians."""

    builtin: float
    own: float
    adds: float


@dataclass(slots=True)
class Answer:
    """Token ids of one request; when its first and its last piece came."""

    token_ids: list[int] = field(default_factory=list)
    first_tokens: int = 0
    first: float = 0.0
    last: float = 0.0

    def add(self, token_ids: Sequence[int], now: float) -> None:
        """Take in a piece."""
        if not self.token_ids:
            self.first, self.first_tokens = now, len(token_ids)
        self.token_ids += token_ids
        self.last = now


def draw(row: LogitsRow) -> int:
    """The most likely token."""
    return int(np.asarray(row.logits).argmax())


def python_costs(engine: Engine, case: Case) -> Costs:
    """Client and sampler in this process. Raises RuntimeError where the tokens differ."""
    builtin, own = [], []
    with ExternalSampler(engine.run_dir, draw, num_rows=case.streams) as sampler:
        for pair in range(case.pairs + 1):
            order = [None, sampler] if pair % 2 == 0 else [sampler, None]
            answers = {each: ask(engine, case, pair, each) for each in order}
            tokens = [[answer.token_ids for answer in each] for each in answers.values()]
            if tokens[0] != tokens[1]:
                raise RuntimeError("the program does not draw what the engine does")
            if pair > 0:  # the first one warms up
                builtin.append(microseconds_per_token(answers[None]))
                own.append(microseconds_per_token(answers[sampler]))
    adds = [b - a for a, b in zip(builtin, own, strict=True)]
    return Costs(*map(statistics.median, (builtin, own, adds)))


def ask(engine: Engine, case: Case, pair: int, sampler: ExternalSampler | None) -> list[Answer]:
    """All requests of a case at once; without a sampler, the engine draws greedily."""
    starts = []
    for i in range(case.streams):
        if sampler is None:
            params = common_pb2.SamplingParams(temperature=0)
        else:
            params = sampler.params(tag=i)
        params.max_tokens, params.ignore_eos = case.tokens, True
        request = generate_request(f"Tale {pair}.{i}: once")
        request.sampling_params.CopyFrom(params)
        start = inference_pb2.SessionStart(id=i + 1, generate=request)
        starts.append(inference_pb2.SessionRequest(start=start))
    answers = [Answer() for _ in starts]
    for response in engine.stub.Session(iter(starts), timeout=TIMEOUT):
        now = time.perf_counter()
        for event in response.events:
            if event.HasField("error"):
                raise RuntimeError(event.error.message)
            answers[event.id - 1].add(event.output.token_ids, now)
    if any(len(answer.token_ids) != case.tokens for answer in answers):
        raise RuntimeError("an answer did not come whole")
    return answers


def microseconds_per_token(answers: Sequence[Answer]) -> float:
    """Of the streams together: their time over their tokens, from the first piece on."""
    seconds = sum(answer.last - answer.first for answer in answers)
    tokens = sum(len(answer.token_ids) - answer.first_tokens for answer in answers)
    return 1e6 * seconds / tokens


def cpp_costs(program: Path, engine: Engine, case: Case) -> Costs:
    """The same by the C++ program, which checks the tokens itself."""
    command = [
        str(program), engine.address, str(engine.run_dir), "--requests", str(case.streams),
        "--tokens", str(case.tokens), "--bench", str(case.pairs),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    word, *medians = done.stdout.splitlines()[-1].split()
    assert word == "median", done.stdout
    return Costs(*map(float, medians))


def cpp_program() -> Path | None:
    """Built, optimized; None where this machine has no tools for it."""
    if missing := [tool for tool in CPP_TOOLS if shutil.which(tool) is None]:
        print(f"# no C++: {', '.join(missing)} not installed (examples/cpp/README.md)", flush=True)
        return None
    folder = ROOT / "build" / "bench-own-sampler"
    jobs = str(len(os.sched_getaffinity(0)))
    for command in (
        ["cmake", "-S", str(ROOT / "examples" / "cpp"), "-B", str(folder)],
        ["cmake", "--build", str(folder), "--target", "own_sampler", "-j", jobs],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(done.stdout + done.stderr)
    return folder / "own_sampler"


@contextmanager
def engines(real_model: Path, folder: Path, model: str) -> Iterator[Engine]:
    """The engine of a MODEL."""
    if model == "real":
        with running_engine(real_model, folder / "real") as engine:
            yield engine
    else:
        tiny = tiny_model(folder, max_position_embeddings=1024)
        with running_engine(tiny, folder / "tiny", *SMALL) as engine:
            yield engine


def measure(args: argparse.Namespace, folder: Path) -> dict[tuple[str, str, int], Costs]:
    """Costs by model, language and streams."""
    program = cpp_program()
    found: dict[tuple[str, str, int], Costs] = {}
    for model in ("tiny", "real"):
        with engines(args.model, folder, model) as engine:
            pids = [engine.process.pid, *(engine.pid(name) for name in engine.names)]
            with Disturbance(pids) as others:
                for streams in STREAMS:
                    case = Case(streams, 64, 3) if args.quick else Case(streams, 160, 9)
                    if program is not None:
                        found[model, "cpp", streams] = cpp_costs(program, engine, case)
                    found[model, "python", streams] = python_costs(engine, case)
            if program is None and others.share > DISTURBED:  # else the program is among them
                print(f"# others took {others.share:.0%} of the cores", flush=True)
            engine.wait_idle()
    return found


def main() -> int:
    """Run the benchmark; exit code 0 when it ran."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter pairs")
    args = parser.parse_args()
    results = Results("bench-own-sampler")
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder:
        found = measure(args, Path(folder))
    for (model, language, streams), costs in found.items():
        results.beside(f"{language}_{model}_{streams}", costs.own, costs.builtin)
    print(
        f"\n{'model':7}{'program':9}{'streams':>8}{'built-in':>10}{'own':>8}{'adds':>8}  us/token"
    )
    for (model, language, streams), costs in found.items():
        numbers = f"{streams:8}{costs.builtin:10.0f}{costs.own:8.0f}{costs.adds:8.0f}"
        print(f"{model:7}{language:9}{numbers}", flush=True)
    results.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
