"""The one form of every benchmark's results (bench/README.md)."""

import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Figure:
    """`ours` and `peer` in the same unit; `ratio` is ours over peer. Without a target it is met."""

    ours: float
    peer: float
    ratio: float
    target: float | None
    met: bool


@dataclass(slots=True)
class Results:
    """Figures of one target: printed as they come, written to build/results/<target>.json.

    The caller decides `met`, since for some ratios more is better and for others less.
    """

    target: str
    figures: dict[str, Figure] = field(default_factory=dict)

    def figure(
        self, name: str, ours: float, peer: float, ratio: float, target: float | None, met: bool
    ) -> None:
        """Record a figure and print its line, `name ours peer ratio target`."""
        assert name not in self.figures, f"{name} is measured twice"
        self.figures[name] = Figure(ours, peer, ratio, target, met)
        shown = "-" if target is None else f"{target:g}"
        missed = "" if met else "  missed"
        print(f"{name} {ours:.4g} {peer:.4g} {ratio:.3f} {shown}{missed}", flush=True)

    def beside(self, name: str, ours: float, peer: float) -> None:
        """Record a figure that is shown for comparison and has no target."""
        self.figure(name, ours, peer, ours / peer, None, met=True)

    @property
    def met(self) -> bool:
        """Whether there are figures and all of them met their targets."""
        return bool(self.figures) and all(figure.met for figure in self.figures.values())

    def write(self) -> Path:
        """Write the file and return where it is."""
        path = ROOT / "build" / "results" / f"{self.target}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "figures": {
                name: {
                    "ours": figure.ours,
                    "peer": figure.peer,
                    "ratio": figure.ratio,
                    "target": figure.target,
                    "met": figure.met,
                }
                for name, figure in self.figures.items()
            },
            "commit": commit(),
            "command": shlex.join(["python", *sys.argv]),
            "machine": machine(),
        }
        path.write_text(json.dumps(document, indent=2) + "\n")
        return path


def commit() -> str:
    """The commit of the tree, with "+changes" if it differs from it; "unknown" outside git."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


def machine() -> str:
    """Processor, cores that this process may use, system and Python."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # no procfs here: the platform module's word has to do
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = f"{platform.system()} {platform.release()}"
    return f"{model}, {cores} cores, {system}, Python {platform.python_version()}"
