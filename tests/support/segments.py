"""One position-scripted model (S2) that holds many scripts: the prompt's length picks one.

A prompt of n tokens makes S2 go on with script[n - 1:], so segment k is reached by a prompt of
`starts[k] + 1` filler tokens. Between segments stands the end-of-sequence token.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from scripted_models import T1_EOS, write_s2_positions, write_t1_tokenizer

FILLER = ord(".")


class Segments:
    """Names to scripts, laid out one behind another in one S2 model."""

    def __init__(
        self, scripts: Mapping[str, Sequence[int]], first: int = 8, eos: int = T1_EOS
    ) -> None:
        self.scripts = dict(scripts)
        self._starts: dict[str, int] = {}
        self.script: list[int] = [eos] * first
        for name, script in self.scripts.items():
            self._starts[name] = len(self.script)
            self.script += [*script, eos]

    def prompt(self, name: str, skip: int = 0) -> list[int]:
        """A prompt after which the model follows the named script, from its token `skip` on."""
        return [FILLER] * (self._starts[name] + skip + 1)

    def write(self, folder: Path, pieces: Sequence[str] = (), num_positions: int = 1024) -> None:
        """Write the T1 tokenizer with `pieces` and the model."""
        write_t1_tokenizer(folder, pieces)
        write_s2_positions(folder, self.script, num_positions=num_positions)
