"""The figures of a simulation as text."""

from collections.abc import Sequence

from triptych.services.simulator.figures import ClassFigures, Figures, Times

_MOST_CLASSES = 12


def figures_table(figures: Figures) -> str:
    """Everything but the classes that waited least."""
    cost = figures.scheduler
    fairness = "-  (no window in which several tenants wanted more than there was)"
    if figures.fairness is not None:
        fairness = f"{figures.fairness:.3f}  Jain, over {figures.fairness_windows} windows"
    rows = [
        ("requests", f"{figures.requests:,}"),
        ("  done", f"{figures.done:,}"),
        ("  refused", f"{figures.refused:,}  ({figures.refused_too_long:,} too long)"),
        ("  timed out", f"{figures.timed_out:,}"),
        ("steps", f"{figures.steps:,}"),
        ("simulated", f"{figures.virtual_s:,.1f} s  ({figures.busy_share:.1%} in steps)"),
        ("output", f"{figures.output_tokens:,} tokens  ({figures.output_tokens_per_s:,.1f} per s)"),
        ("running", f"{figures.mean_running:.1f}  (mean; {figures.mean_waiting:.1f} waiting)"),
        ("KV used", f"{figures.kv_used:.1%}  of all blocks"),
        ("KV waste", f"{figures.kv_waste:.2%}  of the slots of held blocks"),
        ("prefix hits", f"{figures.prefix_hit_rate:.1%}  of the tokens looked up"),
        ("preemptions", f"{figures.preemptions:,}"),
        ("queue time", _times(figures.queue)),
        ("first token", _times(figures.ttft)),
        ("total", _times(figures.total)),
        ("fairness", fairness),
        ("scheduler", f"{cost.step_us:.1f} us per step, {cost.submit_us:.1f} us per request"),
        (
            "",
            f"plan {cost.plan_us:.1f}, write {cost.write_us:.1f}, "
            f"samples {cost.samples_us:.1f}, apply {cost.apply_us:.1f}",
        ),
        ("took", f"{figures.wall_s:,.1f} s on this machine"),
    ]
    lines = [f"{name:<12} {value}" for name, value in rows]
    return "\n".join([*lines, "", *_classes(figures.classes)])


def _times(times: Times) -> str:
    named = zip(("mean", "p50", "p99", "max"), times, strict=True)
    return "  ".join(f"{name} {value:.3f}" for name, value in named) + " s"


def _classes(classes: Sequence[ClassFigures]) -> list[str]:
    heads = ("tenant", "priority", "done", "refused", "timed out", "longest wait", "in steps")
    rows = [heads] + [
        (
            each.tenant or "-",
            str(each.priority),
            f"{each.done:,}",
            f"{each.refused:,}",
            f"{each.timed_out:,}",
            f"{each.longest_wait_s:.3f} s",
            f"{each.longest_wait_steps:,}",
        )
        for each in classes[:_MOST_CLASSES]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    ]
    if len(classes) > _MOST_CLASSES:
        lines.append(f"... and {len(classes) - _MOST_CLASSES} more (--json has all)")
    return lines
