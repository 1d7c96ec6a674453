"""Speed of the device plan on a GPU, against what the GPU can do at most.

    python bench/gpu.py [--out build/gpu] [--seconds 300] [--models Qwen3-8B]
    python bench/gpu.py --device emulated --tiny      (the same code on the CPU: does it run?)

Random weights with the shapes of real models. Decode: milliseconds a step with 1, 8, 64 and 256
sequences of 512 tokens, two steps in flight as in the engine, over the time that reading the
weights once takes at the measured bandwidth of a copy. Prefill: one prompt of 512 to 8192 tokens,
its matrices' operations per second over the measured rate of the vendor's bfloat16 product. Plans:
graphs (cudagraph), eager, and graphs with --deterministic. Writes gpu.md and gpu.json into --out
after each figure; what does not fit into --seconds is left out, and named.
"""

import argparse
import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from triptych.services.executor.backend import BackendOptions
from triptych.services.executor.device.backend import DeviceBackend
from triptych.services.executor.device.device import Device, DeviceMemoryError
from triptych.services.executor.device.loading import DTYPES, DeviceModel
from triptych.services.executor.device.opening import open_device

sys.path[:0] = [str(Path(__file__).parent)]
from gpu_models import SHAPES, TINY, Shape, random_model, with_options
from gpu_report import DecodeFigure, MemoryFigure, PrefillFigure, Report, Target
from gpu_steps import (
    Decoding,
    copy_bandwidth,
    decode_seconds,
    idle_share,
    matmul_rate,
    prefill_seconds,
)

PLANS = ("graphs", "eager", "deterministic")


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    sequences: tuple[int, ...] = (1, 8, 64, 256)
    context: int = 512
    prompts: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    steps: int = 40
    rounds: int = 3
    idle_at: int = 64
    copy_bytes: int = 1 << 30
    matmul: int = 8192

    @property
    def tokens_in_cache(self) -> int:
        """Room for the largest batch, whole blocks each, and the longest prompt."""
        per_row = self.context + 3 * self.steps + 64
        return max(max(self.sequences) * per_row, max(self.prompts) + 64)


TINY_SIZES = Sizes(
    sequences=(1, 3), context=20, prompts=(8, 24), steps=4, rounds=1, idle_at=3,
    copy_bytes=1 << 20, matmul=64,
)  # fmt: skip


class Bench:
    """Measures one shape after another into a report."""

    def __init__(self, device: Device, sizes: Sizes, report: Report, seconds: float) -> None:
        self._device = device
        self._sizes = sizes
        self._report = report
        self._deadline = time.monotonic() + seconds
        dtype = DTYPES["float32" if device.kind == "emulated" else "bfloat16"]
        self._bandwidth = copy_bandwidth(device, sizes.copy_bytes)
        self._rate = matmul_rate(device, sizes.matmul, dtype)
        report.facts |= {
            "device": device.kind,
            "name": device.name,
            "torch": torch.__version__,
            "copy bandwidth GB/s": round(self._bandwidth / 1e9, 1),
            "matmul TFLOP/s": round(self._rate / 1e12, 2),
        }
        device.trim()
        report.write()

    def measure(self, shape: Shape, plans: tuple[str, ...]) -> None:
        """All plans of a shape; the weights are made once."""
        if self._late(shape.name):
            return
        gc.collect()
        self._device.trim()
        try:
            model = random_model(shape, self._device, self._options("graphs"))
            for plan in plans:
                if not self._late(f"{shape.name}, {plan}"):
                    self._plan(shape, with_options(model, self._options(plan)), plan)
        except DeviceMemoryError as error:
            self._note(f"{shape.name}: {error}")
        self._report.write()

    def _options(self, plan: str) -> BackendOptions:
        sizes = self._sizes
        return BackendOptions(
            device="emulated" if self._device.kind == "emulated" else "cuda",
            plan="eager" if plan == "eager" else "cudagraph",
            max_num_seqs=max(sizes.sequences),
            max_num_batched_tokens=max(sizes.prompts),
            deterministic=plan == "deterministic",
            capture_sizes=sizes.sequences,
        )

    def _plan(self, shape: Shape, model: DeviceModel, plan: str) -> None:
        gc.collect()  # the plan before, which graphs may keep alive in a circle
        self._device.trim()
        self._device.reset_peak()
        start = time.monotonic()
        size = model.options.block_size
        blocks = -(-self._sizes.tokens_in_cache // size) + max(self._sizes.sequences)
        backend = DeviceBackend(model, blocks)
        seconds = time.monotonic() - start
        for sequences in self._sizes.sequences:
            self._decode(shape, backend, plan, model.weight_bytes, sequences)
        for tokens in self._sizes.prompts:
            self._prefill(shape, backend, plan, tokens)
        facts = backend.device_facts()
        self._report.memory.append(
            MemoryFigure(
                shape.name, plan, model.weight_bytes, facts.graph_bytes, facts.num_graphs,
                facts.peak_memory_bytes, seconds,
            )
        )  # fmt: skip
        self._report.write()

    def _decode(
        self, shape: Shape, backend: DeviceBackend, plan: str, weight_bytes: int, sequences: int
    ) -> None:
        decoding = Decoding(backend, sequences, self._sizes.context)
        seconds = decode_seconds(decoding, self._sizes.steps)
        floor = weight_bytes / self._bandwidth
        idle = idle_share(decoding, 10) if sequences == self._sizes.idle_at else None
        self._report.decode.append(
            DecodeFigure(
                shape.name, plan, sequences, seconds * 1e3, sequences / seconds, floor * 1e3,
                floor / seconds, idle,
            )
        )  # fmt: skip
        self._report.write()

    def _prefill(self, shape: Shape, backend: DeviceBackend, plan: str, tokens: int) -> None:
        seconds = prefill_seconds(backend, tokens, self._sizes.rounds)
        share = 2 * shape.matrix_parameters * tokens / seconds / self._rate
        self._report.prefill.append(
            PrefillFigure(shape.name, plan, tokens, seconds * 1e3, tokens / seconds, share)
        )
        self._report.write()

    def _late(self, what: str) -> bool:
        late = time.monotonic() > self._deadline
        if late:
            self._note(f"{what}: left out, the time was over")
        return late

    def _note(self, text: str) -> None:
        self._report.notes.append(text)
        self._report.write()


def add_targets(report: Report, model: str) -> None:
    """What issue 8 asks for, of one model (8B, bfloat16), as far as it was measured."""
    decode = {(d.plan, d.sequences): d for d in report.decode if d.model == model}
    for sequences in (1, 64):
        if found := decode.get(("graphs", sequences)):
            name = f"{model}: decode of {sequences}, share of the bandwidth floor"
            report.targets.append(Target(name, found.share, 0.75, at_least=True))
    for p in report.prefill:
        if p.model == model and p.plan == "graphs" and p.tokens >= 2048:
            name = f"{model}: prefill of {p.tokens}, share of the matmul rate"
            report.targets.append(Target(name, p.share, 0.6, at_least=True))
    graphs, eager = decode.get(("graphs", 1)), decode.get(("eager", 1))
    if graphs and eager:
        gain = eager.milliseconds / graphs.milliseconds
        report.targets.append(Target(f"{model}: graphs over eager at 1", gain, 1.5, at_least=True))
    for (plan, sequences), found in decode.items():
        fast = decode.get(("graphs", sequences))
        if plan == "deterministic" and fast:
            slower = found.milliseconds / fast.milliseconds
            name = f"{model}: deterministic, decode of {sequences}, times slower"
            report.targets.append(Target(name, slower, 1.6, at_least=False))
    idle = [d.idle for (plan, _), d in decode.items() if plan == "graphs" and d.idle is not None]
    if idle:
        name = f"{model}: idle between decode steps"
        report.targets.append(Target(name, max(idle), 0.03, at_least=False))


def main() -> None:
    """Measure and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="two layers of 32: does it run?")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--models", nargs="+", help="names; all without")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=PLANS)
    options = parser.parse_args()
    shapes, sizes = (TINY, TINY_SIZES) if options.tiny else (SHAPES, Sizes())
    if options.models:
        shapes = tuple(shape for shape in shapes if shape.name in options.models)
    report = Report(options.out)
    device = open_device(options.device)
    bench = Bench(device, sizes, report, options.seconds)
    # The dense 8B first: the targets are its.
    for shape in sorted(
        shapes, key=lambda shape: -shape.matrix_parameters * (shape.weights == "dense")
    ):
        bench.measure(shape, tuple(options.plans) if shape.weights == "dense" else ("graphs",))
    for shape in shapes:
        if shape.weights == "dense":
            add_targets(report, shape.name)
    report.write()
    print(report.markdown())
    device.close()


if __name__ == "__main__":
    main()
