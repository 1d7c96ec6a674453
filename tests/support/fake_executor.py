"""An executor process whose model is a hash: the next token depends on every token before it.

It keeps the tokens where keys and values would be and reads them back through the block tables, so
a wrong slot, a stale block or a missing recompute changes the answer. `next_token` is the truth.

    python tests/support/fake_executor.py --run-dir DIR [--step-seconds S] [--num-blocks N]
                                          [--draft-model none|good|short] [--held-by FILE]
                                          [--draws-tokens 1] [--late S] [--lie WHAT]

No step ends while FILE is there; the process beats all the same.

Its draft model, if any, is the same hash; a `short` one says one guess less than it was asked for.
How it draws tokens is in drawing_backend.py.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from drawing_backend import DrawingBackend, Lie
from triptych.services.executor.backend import Backend, BackendFacts, Logits
from triptych.services.executor.draft_model import DraftModel
from triptych.services.executor.stats import Counters
from triptych.services.executor.step_inputs import Ints, StepInputs
from triptych.services.executor.worker import Worker
from triptych.services.runtime.lifecycle import run_main
from triptych.services.runtime.run_dir import RunDir

VOCABULARY = 97
FINGERPRINT = "fake-model"
MAX_MODEL_LEN = 256
BLOCK_SIZE = 4
RAISE_TOKEN = 95
"""A prompt that contains it makes the step raise."""
NAN_TOKEN = 96
"""A prompt that contains it makes the row's logits NaN."""
DIE_TOKEN = 93
"""A step that computes it kills the executor."""
_USUAL = 90  # next tokens are below, so none of these is ever the likeliest


def _state_of(tokens: Sequence[int]) -> int:
    state = 17
    for token in tokens:
        state = (state * 31 + int(token) + 7) % 1_000_003
    return state


def next_token(tokens: Sequence[int]) -> int:
    """The greedy next token after `tokens`."""
    return _state_of(tokens) % _USUAL


def _other_logits(tokens: Sequence[int]) -> NDArray[np.float32]:
    """Below 3; they depend on all tokens too. Tokens that do harm are never drawn."""
    logits = (_state_of(tokens) * (np.arange(VOCABULARY) + 3)) % 89 / np.float32(30)
    logits[[DIE_TOKEN, RAISE_TOKEN, NAN_TOKEN]] = -1e4
    return logits.astype(np.float32)


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The `count` greedy tokens after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeBackend:
    """A Backend without a model."""

    def __init__(
        self, num_blocks: int, step_seconds: float, fingerprint: str, held_by: str = ""
    ) -> None:
        self.fingerprint = fingerprint
        self._held_by = held_by
        self._step_seconds = step_seconds
        self._cache = np.full(num_blocks * BLOCK_SIZE, -1, np.int64)
        self._facts = BackendFacts(
            device="cpu",
            plan="fake",
            dtype="float32",
            architecture="fake",
            model="fake",
            parameters=0,
            weight_bytes=0,
            vocabulary_size=VOCABULARY,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            kv_cache_bytes=self._cache.nbytes,
        )

    @property
    def facts(self) -> BackendFacts:
        return self._facts

    def reserve(self, max_tokens: int) -> None:
        """Nothing to make room for."""

    def execute(self, inputs: StepInputs, logits: Logits) -> None:
        time.sleep(self._step_seconds)
        while self._held_by and Path(self._held_by).exists():
            time.sleep(0.002)
        cache = self._cache.reshape(-1, BLOCK_SIZE)
        for source, target in zip(inputs.copy_sources, inputs.copy_targets, strict=True):
            cache[target] = cache[source]
        self._cache[inputs.slots] = inputs.token_ids
        if DIE_TOKEN in inputs.token_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        for out, token in zip(logits, inputs.logits_tokens, strict=False):
            row = int(np.searchsorted(inputs.row_starts, token, "right")) - 1
            place = np.arange(inputs.positions[token] + 1)
            blocks = inputs.block_tables[row, place // BLOCK_SIZE].astype(np.int64)
            tokens = self._cache[blocks * BLOCK_SIZE + place % BLOCK_SIZE].tolist()
            if RAISE_TOKEN in tokens:
                raise RuntimeError("the fake was told to raise")
            out[:] = np.nan if NAN_TOKEN in tokens else _other_logits(tokens)
            out[next_token(tokens)] += 10.0


class ShortDraftModel(DraftModel):
    """One that does not answer all it was asked."""

    def guess(self, inputs: StepInputs) -> tuple[StepInputs, Ints]:
        guessed, guesses = super().guess(inputs)
        return guessed, guesses[:-1]


class ExecutorProcess:
    """A running fake executor, and how to end it."""

    def __init__(self, run_dir: Path, **options: object) -> None:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        self._process = subprocess.Popen(
            [sys.executable, __file__, f"--run-dir={run_dir}", *flags],
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()
        self._end()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def wait(self, timeout: float) -> tuple[int, str]:
        """Exit code and what it said on stderr."""
        _, said = self._process.communicate(timeout=timeout)
        return self._process.returncode, said

    def _end(self) -> None:
        self._process.wait(30)
        if self._process.stderr is not None:
            self._process.stderr.close()


def _main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--num-blocks", type=int, default=64)
    parser.add_argument("--fingerprint", default=FINGERPRINT)
    parser.add_argument("--heartbeat-interval", type=float, default=0.1)
    parser.add_argument("--draft-model", choices=("none", "good", "short"), default="none")
    parser.add_argument("--held-by", default="")
    parser.add_argument("--draws-tokens", type=int, default=0)
    parser.add_argument("--late", type=float, default=0.0)
    parser.add_argument("--lie", choices=get_args(Lie), default="none")
    options = parser.parse_args()
    backend: Backend = FakeBackend(
        options.num_blocks, options.step_seconds, options.fingerprint, options.held_by
    )
    if options.draws_tokens:
        backend = DrawingBackend(backend, options.late, options.lie)
    worker = Worker(
        RunDir.open(options.run_dir), "executor-0", 0, options.heartbeat_interval, Counters()
    )
    draft = None
    if options.draft_model != "none":
        kind = DraftModel if options.draft_model == "good" else ShortDraftModel
        draft = kind(FakeBackend(options.num_blocks, 0.0, options.fingerprint))
    worker.run(backend, options.fingerprint, draft)
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(run_main("executor", _main))
