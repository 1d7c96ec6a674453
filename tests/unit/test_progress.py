"""What `triptych serve` shows while the processes start."""

import asyncio
import io
import logging
import os
import re
import time
from collections.abc import Iterator

import pytest

from triptych.services.cli import progress
from triptych.services.cli.progress import StartupProgress, load_line
from triptych.services.executor import __main__ as executor
from triptych.services.executor.stats import Counters, executor_stats

GIB = 1 << 30


class Terminal(io.StringIO):
    """A stream that says that it is one."""

    def isatty(self) -> bool:
        return True


def test_load_line() -> None:
    assert load_line(0, 2 * GIB, 0.0) == f"loading weights [{'-' * 20}] 0% of 2.0 GiB"
    assert load_line(GIB, 2 * GIB, GIB / 4) == (
        f"loading weights [{'#' * 10}{'-' * 10}] 50% of 2.0 GiB, 256.0 MiB/s, 4 s left"
    )
    assert load_line(3 * GIB, 2 * GIB, GIB).endswith("100% of 2.0 GiB, 1.0 GiB/s, 0 s left")
    assert len(load_line(GIB, 999 * GIB, GIB)) < 80


async def show(out: io.StringIO, answers: Iterator[tuple[int, int] | None]) -> None:
    """Redraw until the answers are used up; the process was there all the time."""
    done = asyncio.Event()

    async def load() -> tuple[int, int] | None:
        try:
            return next(answers)
        except StopIteration:
            done.set()
            return None

    shown = StartupProgress(("executor-0",), out, load)
    shown.start(lambda: {"executor-0": os.getpid()})
    if out.isatty():
        async with asyncio.timeout(20):
            await done.wait()
    shown.note("executor-0", "ready")
    shown.finish()
    shown.finish()


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_REDRAW", 0.01)
    monkeypatch.setattr(progress, "_ASK_AFTER", 0.0)
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    asyncio.run(show(out, iter([None, (GIB, 4 * GIB), (2 * GIB, 4 * GIB), None])))
    lines = re.split(r"[\r\x1b]+(?:\[2K)?", out.getvalue())
    shares = [line.split("] ")[1] for line in lines if "loading weights [" in line]
    assert shares[0] == "25% of 4.0 GiB"  # one look gives no rate
    assert re.fullmatch(r"50% of 4\.0 GiB, [\d.]+ [KMGT]iB/s, \d+ s left", shares[1])
    assert any(line.startswith("starting, 0 s: executor-0 ") for line in lines)
    assert out.getvalue().endswith("\x1b[2K")  # nothing is left of it


def test_log_lines_without_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    out = io.StringIO()
    with caplog.at_level(logging.INFO):
        asyncio.run(show(out, iter([(1, 2)])))
    assert out.getvalue() == ""
    assert [record.getMessage() for record in caplog.records] == ["executor-0 ready"]


def test_the_executor_counts_and_seldom_speaks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    counters = Counters()
    heard = executor._Progress(counters)
    with caplog.at_level(logging.INFO):
        for second in range(13):
            now[0] = 100.0 + second
            heard(second * 10, 200)
    stats = executor_stats(None, counters)
    assert (stats.load_bytes_done, stats.load_bytes_total) == (120, 200)
    assert [record.getMessage() for record in caplog.records] == [
        "loading weights 25%",
        "loading weights 50%",
    ]
