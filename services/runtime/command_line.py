"""Command lines whose refusals are start-up errors: one line, exit code 2, no usage text."""

import argparse
import difflib
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

from triptych.services.runtime.lifecycle import StartupError


class LineParser(argparse.ArgumentParser):
    """Raises StartupError where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line. Raises StartupError."""
        raise StartupError(message)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all of `argv`. Raises StartupError, with the nearest flag for one it lacks."""
        given, rest = self.parse_known_args(argv)
        if rest:
            raise StartupError(unknown_flag(rest[0], [action.dest for action in self._actions]))
        return given


def unknown_flag(argument: str, known: Collection[str]) -> str:
    """The line for a command-line argument that no flag takes."""
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}"
    name = argument.split("=", 1)[0]
    key = name.lstrip("-").replace("-", "_")
    return f"unknown flag {name}{nearest(key, known, flag_spelling)}"


def flag_spelling(key: str) -> str:
    """`max_num_seqs` to `--max-num-seqs`."""
    return "--" + key.replace("_", "-")


def nearest(
    key: str, known: Collection[str], spelling: Callable[[str], str] = lambda key: key
) -> str:
    """`; did you mean ...?` for the most similar known name, or nothing."""
    found = difflib.get_close_matches(key.replace("-", "_"), sorted(known), n=1, cutoff=0.5)
    if not found:
        return ""
    return f"; did you mean {spelling(found[0])}?"
