"""`triptych bench simulate`: how the scheduler would do, without a model and faster than life."""

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from triptych.services.cli.simulate_settings import SimulateSettings
from triptych.services.cli.simulate_table import figures_table
from triptych.services.runtime.lifecycle import EXIT_OK, StartupError
from triptych.services.runtime.settings import load_settings
from triptych.services.runtime.settings_flags import build_parser
from triptych.services.simulator.arrivals import Arrival, Trace
from triptych.services.simulator.figures import Figures
from triptych.services.simulator.generated_trace import GeneratedTrace
from triptych.services.simulator.simulation import Progress, Simulation
from triptych.services.simulator.trace_file import BadTrace, SavedTrace, TraceFile

_PROG = "triptych bench simulate"
_CLEAR_LINE = "\r\x1b[2K"
_LIVE_INTERVAL = 0.5  # seconds between progress lines on a terminal
_LOG_INTERVAL = 10.0  # and elsewhere
_ABOUT = (
    "Runs the real scheduler under a modelled executor and a virtual clock: generated or recorded "
    "requests, no model, no sockets. Shows what a setting does to waits, preemptions, fairness and "
    "memory, and what the scheduler itself costs on this machine."
)
_EXAMPLES = """
examples:
  the defaults: SmolLM2 on two cores, 10,000 requests at 4 a second
    triptych bench simulate

  do low priorities starve when there is too much to do?
    triptych bench simulate --request-rate 8 --priorities 2 --scheduling-policy priority

  one tenant sends most: first come, first served against fair shares
    triptych bench simulate --request-rate 8 --tenants 4 --tenant-skew 2 --scheduling-policy fcfs
    triptych bench simulate --request-rate 8 --tenants 4 --tenant-skew 2 --scheduling-policy fair

  what do shared prompts save?
    triptych bench simulate --prefix-groups 16 --prefix-tokens 512
    triptych bench simulate --prefix-groups 16 --prefix-tokens 512 --no-enable-prefix-caching

  too few blocks: preemptions, and how many requests a time-out costs
    triptych bench simulate --num-blocks 512 --request-rate 6 --queue-timeout 10

  the same requests again, under an engine's own settings file
    triptych bench simulate --requests 5000 --save-trace day.jsonl
    triptych bench simulate --trace day.jsonl --config engine.yaml --json figures.json

  a trace is one JSON object a line, in the order of arrival (seconds):
    {"arrival": 0.25, "prompt_tokens": 310, "output_tokens": 64, "priority": 0, "tenant": "a"}
"""


def run(argv: Sequence[str]) -> int:
    """The body of `triptych bench simulate`. Raises StartupError for what cannot be run."""
    if {"-h", "--help"} & {*argv}:
        print(help_text())
        return EXIT_OK
    settings = load_settings(SimulateSettings, [_spelled(each) for each in argv], prog=_PROG)
    with contextlib.ExitStack() as files:
        report = _opened(settings.json_file, "json", files)
        trace, arrivals = _trace(settings, files)
        progress = ProgressLine(sys.stderr, lambda: trace.fraction)
        try:
            engine = settings.engine
        except ValueError as error:
            raise StartupError(str(error)) from error
        simulation = Simulation(
            engine,
            settings.cost,
            seed=settings.seed,
            fairness_window=settings.fairness_window,
            watch=progress.show,
            watch_interval=progress.interval,
        )
        try:
            figures = simulation.run(arrivals)
        except BadTrace as error:
            raise StartupError(str(error)) from error
        finally:
            progress.finish()
        if report is not None:
            json.dump(_report(settings, figures), report, indent=2)
            report.write("\n")
    print(figures_table(figures))
    return EXIT_OK


def help_text() -> str:
    """What `--help` prints."""
    parser = build_parser([SimulateSettings], _PROG, _ABOUT)
    return (parser.format_help() + _EXAMPLES).replace("--json-file VALUE", "--json VALUE     ")


def _spelled(argument: str) -> str:
    """`--json FILE`: a settings type cannot have a key of that name."""
    name, equals, value = argument.partition("=")
    return f"--json-file{equals}{value}" if name == "--json" else argument


def _opened(path: str | None, flag: str, files: contextlib.ExitStack) -> TextIO | None:
    """Now, not after minutes of work."""
    if path is None:
        return None
    try:
        return files.enter_context(Path(path).open("w", encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"{flag}: {path}: {error.strerror}") from error


def _trace(
    settings: SimulateSettings, files: contextlib.ExitStack
) -> tuple[Trace, Iterable[Arrival]]:
    """What tells how far it is, and what gives the arrivals."""
    if settings.trace is not None:
        try:
            recorded = files.enter_context(contextlib.closing(TraceFile(Path(settings.trace))))
        except BadTrace as error:
            raise StartupError(f"trace: {error}") from error
        return recorded, recorded
    generated = GeneratedTrace(settings.shape)
    out = _opened(settings.save_trace, "save_trace", files)
    return generated, generated if out is None else _saved(generated, out, settings)


def _saved(trace: Trace, out: TextIO, settings: SimulateSettings) -> Iterator[Arrival]:
    try:
        yield from SavedTrace(iter(trace), out)
        out.flush()
    except OSError as error:
        raise StartupError(f"save_trace: {settings.save_trace}: {error.strerror}") from error


def _report(settings: SimulateSettings, figures: Figures) -> dict[str, object]:
    told = settings.model_dump(exclude={"run_dir", "log_level", "parent_pid", "json_file"})
    return {"settings": told, "step_cost_s": settings.cost._asdict(), "figures": figures.as_json()}


class ProgressLine:
    """One line that is written over on a terminal; elsewhere a line now and then."""

    def __init__(self, out: TextIO, fraction: Callable[[], float]) -> None:
        self._out = out
        self._fraction = fraction
        self._live = out.isatty()
        self.interval = _LIVE_INTERVAL if self._live else _LOG_INTERVAL

    def show(self, progress: Progress) -> None:
        """How far it is, how fast, and how long it will take."""
        fraction = self._fraction()
        rate = progress.requests / max(progress.wall_s, 1e-9)
        left = progress.wall_s * (1 - fraction) / fraction if fraction > 0 else 0.0
        line = (
            f"simulate: {fraction:.0%}, {progress.requests:,} requests, {progress.steps:,} steps, "
            f"{rate:,.0f} requests/s, {clock(progress.virtual_s)} simulated, {clock(left)} left"
        )
        if self._live:
            line = f"{_CLEAR_LINE}{line[: shutil.get_terminal_size().columns - 1]}"
        self._out.write(line if self._live else f"{line}\n")
        self._out.flush()

    def finish(self) -> None:
        """Remove the live line."""
        if self._live:
            self._out.write(_CLEAR_LINE)
            self._out.flush()


def clock(seconds: float) -> str:
    """90061 to 1d 1:01:01."""
    days, rest = divmod(int(seconds), 86_400)
    return (f"{days}d " if days else "") + time.strftime("%-H:%M:%S", time.gmtime(rest))
