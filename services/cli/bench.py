"""`triptych bench`: measurements that need no running engine."""

import difflib
import importlib
from collections.abc import Callable, Sequence
from typing import cast

from triptych.services.runtime.lifecycle import EXIT_OK, EXIT_STARTUP, StartupError

_BENCHES: dict[str, tuple[str, str]] = {
    # name: (module with `run(argv) -> int`, what it does)
    "simulate": (
        "triptych.services.cli.simulate",
        "the real scheduler under a modelled executor: waits, waste, fairness",
    ),
}


def run(argv: Sequence[str]) -> int:
    """The body of `triptych bench`. Raises StartupError for an unknown name."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return EXIT_OK if argv else EXIT_STARTUP
    name, rest = argv[0], argv[1:]
    if name not in _BENCHES:
        close = difflib.get_close_matches(name, _BENCHES, n=1)
        hint = f"; did you mean {close[0]}?" if close else "; see triptych bench --help"
        raise StartupError(f"unknown benchmark {name!r}{hint}")
    module = importlib.import_module(_BENCHES[name][0])
    return cast(Callable[[Sequence[str]], int], module.run)(rest)


def _help() -> str:
    lines = [f"  {name:<10} {what}" for name, (_, what) in _BENCHES.items()]
    return "\n".join(
        [
            "usage: triptych bench NAME [--flags]",
            "",
            "Measurements that need neither a model nor a running engine.",
            "",
            *lines,
            "",
            "triptych bench NAME --help explains its flags.",
        ]
    )
