"""What every part of bench-peers needs: the setup, our engine, targets and the report."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "support")]
from lane import LANES, Lane
from machine_load import DISTURBED
from results import Results

from engine import Engine, running_engine

THREADS = 2
PINNED = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores", "OMP_WAIT_POLICY": "active"}
CONCURRENCY = 32
SEQUENCE = 768  # tokens of the longest served request
KV_TOKEN_BYTES = 2 * 30 * 3 * 64 * 2  # keys and values, layers, KV heads, head size, 16 bits

# What the ratio, ours over peer, must at least or at most be.
AT_LEAST = {
    "decode_1_same": 1.7, "decode_1_best": 1.6, "decode_8": 1.8, "decode_32": 2.5,
    "prefill_512_same": 4.5, "prefill_512_best": 1.8, "prefill_2048": 2.0, "served_mixed": 3.0,
    "decode_1_transformers": 1.0, "prefill_512_transformers": 1.0, "spec_quote": 1.5,
    "spec_quote_best": 1.0,
}  # fmt: skip
AT_MOST = {
    "served_ttft_p99": 0.4, "served_itl_p99": 0.4, "start_first_token": 1.0, "rss_executor": 1.2,
    "schema_overhead_1": 1.1, "schema_overhead_32": 1.1, "schema_overhead_text_1": 1.1,
    "schema_overhead_text_32": 1.1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setup:
    """What the command line says. `best` is the peer's Q4_0 file."""

    model: Path
    best: Path
    peer_python: Path
    quick: bool
    peer_unified: bool

    @property
    def rounds(self) -> int:
        return 2 if self.quick else 5

    @property
    def served_rounds(self) -> int:
        return 1 if self.quick else 3

    @property
    def steps(self) -> int:
        """Decode steps of one measurement."""
        return 24 if self.quick else 64

    def peer(self, model: Path) -> Lane:
        unified = ["--unified"] if self.peer_unified else []
        arguments = [str(model), "--threads", str(THREADS), *unified]
        return Lane(self.peer_python, "llama_lane.py", arguments, PINNED)

    def peer_text(self) -> Lane:
        """llama.cpp's grammars and lookup decoding, on `best`."""
        arguments = [str(self.best), "--threads", str(THREADS)]
        return Lane(self.peer_python, "llama_text_lane.py", arguments, PINNED)


@dataclass(slots=True)
class Report:
    """Figures with their targets, and notes on what disturbed them."""

    results: Results

    def add(self, name: str, ours: float, peer: float) -> None:
        ratio = ours / peer
        if name in AT_LEAST:
            target, met = AT_LEAST[name], ratio >= AT_LEAST[name]
        else:
            target, met = AT_MOST[name], ratio <= AT_MOST[name]
        self.results.figure(name, ours, peer, ratio, target, met)

    @staticmethod
    def spread(who: str, values: list[float]) -> None:
        print(f"    {who}: " + " ".join(f"{value:.4g}" for value in values), flush=True)


def warn(what: str, shares: list[float]) -> None:
    """Say when other processes took a part of the cores."""
    if max(shares) > DISTURBED:
        print(f"    {what}: others took up to {max(shares):.0%} of the cores", flush=True)


@contextlib.contextmanager
def our_engine(setup: Setup, *flags: str) -> Iterator[Engine]:
    """The three processes with default settings, but for the size of the KV cache and `flags`."""
    kv_bytes = CONCURRENCY * SEQUENCE * KV_TOKEN_BYTES
    sized = ("--kv-cache-memory", str(kv_bytes), "--cpu-threads", str(THREADS))
    with (
        tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder,
        running_engine(setup.model, Path(folder) / "run", *sized, *flags) as engine,
    ):
        yield engine


def requantize(setup: Setup) -> None:
    """Let llama.cpp write its Q4_0 of the model, once."""
    if setup.best.is_file():
        return
    setup.best.parent.mkdir(parents=True, exist_ok=True)
    part = setup.best.with_suffix(".part")
    subprocess.run(
        [str(setup.peer_python), str(LANES / "llama_lane.py"), str(setup.model), "--threads",
         str(THREADS), "--requantize", str(part)],
        check=True,
    )  # fmt: skip
    part.rename(setup.best)
