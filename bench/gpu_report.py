"""The report of bench/gpu.py: written after each figure, so that a time-out leaves the others."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DecodeFigure:
    """`share`: bytes of the matrices / measured bandwidth, over the time. `idle`: of the time."""

    model: str
    plan: str
    sequences: int
    milliseconds: float
    tokens_per_second: float
    floor_milliseconds: float
    share: float
    idle: float | None = None


@dataclass(frozen=True, slots=True)
class PrefillFigure:
    """`share`: operations of the matrices per second, over the measured matmul rate."""

    model: str
    plan: str
    tokens: int
    milliseconds: float
    tokens_per_second: float
    share: float


@dataclass(frozen=True, slots=True)
class MemoryFigure:
    """Bytes. `weights`: of the matrices that a step reads. `peak` is of the whole process."""

    model: str
    plan: str
    weights: int
    graphs: int
    num_graphs: int
    peak: int
    capture_seconds: float


@dataclass(frozen=True, slots=True)
class Target:
    """What was asked for, and what came out."""

    name: str
    value: float
    target: float
    at_least: bool

    @property
    def met(self) -> bool:
        """Whether it is on the right side."""
        return self.value >= self.target if self.at_least else self.value <= self.target


@dataclass(slots=True)
class Report:
    """All figures; `facts` are of the machine, `notes` what could not be measured, and why."""

    folder: Path
    facts: dict[str, str | float] = field(default_factory=dict)
    decode: list[DecodeFigure] = field(default_factory=list)
    prefill: list[PrefillFigure] = field(default_factory=list)
    memory: list[MemoryFigure] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def write(self) -> None:
        """gpu.json and gpu.md."""
        self.folder.mkdir(parents=True, exist_ok=True)
        targets = [{**asdict(each), "met": each.met} for each in self.targets]
        document = {
            "facts": self.facts,
            "decode": [asdict(each) for each in self.decode],
            "prefill": [asdict(each) for each in self.prefill],
            "memory": [asdict(each) for each in self.memory],
            "targets": targets,
            "notes": self.notes,
        }
        (self.folder / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")
        (self.folder / "gpu.md").write_text(self.markdown())

    def markdown(self) -> str:
        """Tables."""
        parts = ["# Measured on a GPU" if self.facts.get("device") == "cuda" else "# Tried out"]
        parts += [f"* {name}: {value}" for name, value in self.facts.items()]
        parts += [f"* note: {note}" for note in self.notes]
        parts += _table(
            "Targets",
            ["target", "value", "asked", "met"],
            [
                [t.name, f"{t.value:.3g}", f"{'>=' if t.at_least else '<='} {t.target:g}",
                 "yes" if t.met else "no"]
                for t in self.targets
            ],
        )  # fmt: skip
        parts += _table(
            "Decode",
            ["model", "plan", "sequences", "ms per step", "tokens/s", "floor ms", "share of floor",
             "idle"],
            [
                [d.model, d.plan, str(d.sequences), f"{d.milliseconds:.3f}",
                 f"{d.tokens_per_second:.0f}", f"{d.floor_milliseconds:.3f}", f"{d.share:.1%}",
                 "-" if d.idle is None else f"{d.idle:.1%}"]
                for d in self.decode
            ],
        )  # fmt: skip
        parts += _table(
            "Prefill",
            ["model", "plan", "tokens", "ms", "tokens/s", "share of matmul rate"],
            [
                [p.model, p.plan, str(p.tokens), f"{p.milliseconds:.2f}",
                 f"{p.tokens_per_second:.0f}", f"{p.share:.1%}"]
                for p in self.prefill
            ],
        )  # fmt: skip
        parts += _table(
            "Memory",
            ["model", "plan", "matrices GB", "graphs", "graphs MB", "peak GB", "capture s"],
            [
                [m.model, m.plan, f"{m.weights / 1e9:.2f}", str(m.num_graphs),
                 f"{m.graphs / 1e6:.0f}", f"{m.peak / 1e9:.2f}", f"{m.capture_seconds:.1f}"]
                for m in self.memory
            ],
        )  # fmt: skip
        return "\n".join(parts) + "\n"


def _table(title: str, head: list[str], rows: list[list[str]]) -> list[str]:
    if not rows:
        return []
    lines = [head, ["---"] * len(head), *rows]
    return ["", f"## {title}", "", *(f"| {' | '.join(line)} |" for line in lines)]
