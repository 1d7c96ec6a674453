"""A PNG of a benchmark's figures: how each ratio stands to its target.

    make bench-plot [TARGET=bench-peers]

Reads build/results/TARGET.json, writes build/results/TARGET.png. A bar is ours over the peer's on a
logarithmic axis, the mark on it the target: blue bars met it, orange ones did not, grey ones have
none.
"""

import argparse
import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

RESULTS = Path(__file__).parents[1] / "build" / "results"
MET, MISSED, BESIDE = "#2f6db3", "#e07b39", "0.7"


def draw(document: dict[str, object], title: str, path: Path) -> None:
    """Write the picture of a results document."""
    figures = document["figures"]
    assert isinstance(figures, dict)
    names = list(figures)[::-1]
    ratios = [figures[name]["ratio"] for name in names]
    marks = {name: figures[name]["target"] for name in names if figures[name]["target"] is not None}
    colors = [
        (MET if figures[name]["met"] else MISSED) if name in marks else BESIDE for name in names
    ]
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.38 * len(names)), layout="constrained")
    axes.barh(names, ratios, color=colors, height=0.62)
    axes.scatter(
        list(marks.values()), list(marks), marker="|", s=320, linewidths=2, color="black",
        label="target",
    )  # fmt: skip
    axes.axvline(1.0, color="0.6", linewidth=0.8)
    axes.set_xscale("log")
    for name, ratio in zip(names, ratios, strict=True):
        ours, peer = figures[name]["ours"], figures[name]["peer"]
        axes.annotate(
            f" {ratio:.3g}   ({ours:.4g} : {peer:.4g})", (ratio, name), va="center", fontsize=8
        )
    shown = [1.0, *ratios, *marks.values()]
    low, high = min(shown), max(shown)
    axes.set_xlim(low / 1.5, high * 4)
    axes.set_xlabel("ours over peer")
    axes.set_title(f"{title}   {document['commit']:.19}\n{document['machine']}", fontsize=9)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", help="the name of the results, such as bench-peers")
    target = parser.parse_args().target
    source = RESULTS / f"{target}.json"
    if not source.is_file():
        raise SystemExit(f"{source.name} is not in build/results: run `make {target}` first")
    path = source.with_suffix(".png")
    draw(json.loads(source.read_text()), target, path)
    print(f"build/results/{path.name}")


if __name__ == "__main__":
    main()
