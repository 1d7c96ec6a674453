"""What a stream brings beside one text: several choices, scores and logprobs."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TextIO

from triptych.services.cli.client import Call, Response, printable
from triptych.v1 import common_pb2


class Choices:
    """A call that notes what passes."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._texts: dict[int, str] = defaultdict(str)
        self._scores: dict[int, float] = {}
        self._logprobs: dict[int, list[common_pb2.TokenLogprob]] = defaultdict(list)
        self._prompt: list[common_pb2.TokenLogprob] = []

    def __iter__(self) -> Iterator[Response]:
        for response in self._call:
            self._texts[response.index] += response.text
            self._logprobs[response.index] += response.logprobs
            self._prompt += response.prompt_logprobs
            if response.HasField("score"):
                self._scores[response.index] = response.score
            yield response

    def cancel(self) -> bool:
        """End it; the server frees what it held."""
        return self._call.cancel()

    def print_texts(self, out: TextIO) -> None:
        """Each choice under its number, and its score where it has one."""
        for index, text in sorted(self._texts.items()):
            score = f", score {self._scores[index]:.4f}" if index in self._scores else ""
            shown = printable(text) if out.isatty() else text
            out.write(f"[choice {index}{score}]\n{shown}" + "\n" * (not shown.endswith("\n")))
        out.flush()

    def print_logprobs(self, out: TextIO) -> None:
        """A line a token: logprob, rank, the token, and the most likely ones."""
        if self._prompt:
            out.write("[prompt]\n")
            _print_rows(self._prompt, out)
        for index, rows in sorted(self._logprobs.items()):
            if rows:
                out.write(f"[choice {index}]\n")
                _print_rows(rows, out)


def _print_rows(rows: Sequence[common_pb2.TokenLogprob], out: TextIO) -> None:
    for row in rows:
        logprob = f"{row.logprob:10.4f} {row.rank:6d}" if row.HasField("logprob") else " " * 17
        top = " ".join(f"{top.text!r} {top.logprob:.4f}" for top in row.top)
        out.write(f"{logprob}  {row.text!r:16} {top}".rstrip() + "\n")
