"""Our executor's backend in a process of its own: the library, without scheduler and sockets."""

import argparse
import os
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np
from crafted_steps import CraftedSteps, Row
from numpy.typing import NDArray
from protocol import answer_requests

from triptych.services.executor.backend import BackendOptions, open_backend
from triptych.services.runtime.model_files import resolve_model

CHUNK = 512  # tokens in a step, the default of max_num_batched_tokens
ROWS = 64  # sequences in a step, the default of max_num_seqs
Floats = NDArray[np.float32]


class TriptychLane:
    """The operations; see LlamaLane, which has the same."""

    def __init__(self, path: str, plan: Literal["auto", "eager"], threads: int) -> None:
        cores = tuple(sorted(os.sched_getaffinity(0)))[:threads]
        self._backend = open_backend(
            resolve_model(path), BackendOptions(plan=plan, threads=threads, affinity=cores)
        )
        self._backend.reserve(CHUNK)
        self._logits: Floats = np.zeros((ROWS, self._backend.facts.vocabulary_size), np.float32)
        self.prefill([300] * 32)  # warm up
        self.decode([[300] * 32], [[300]])

    def info(self) -> str:
        """The plan that runs, and in which type."""
        facts = self._backend.facts
        return (
            f"{facts.plan} plan, {facts.dtype}, "
            f"{facts.kv_cache_bytes >> 20} MiB of KV cache in {facts.kv_cache_dtype}"
        )

    def _steps(self, sequences: int, length: int) -> CraftedSteps:
        facts = self._backend.facts
        steps = CraftedSteps(length, facts.block_size)
        if steps.blocks(sequences) > facts.num_blocks:
            raise RuntimeError(f"{sequences} sequences of {length} tokens need more KV blocks")
        return steps

    def _prompt(self, steps: CraftedSteps, sequence: int, prompt: Sequence[int]) -> Floats:
        """Compute a prompt in chunks; the logits behind it, [vocabulary], until the next step."""
        for start in range(0, len(prompt), CHUNK):
            chunk = prompt[start : start + CHUNK]
            last = start + len(chunk) == len(prompt)
            inputs = steps.step([Row(sequence, start, chunk, samples=last)])
            self._backend.execute(inputs, self._logits)
        row: Floats = self._logits[0]
        return row

    def decode(self, prompts: list[list[int]], steps: list[list[int]]) -> float:
        """Seconds that all `steps` take together; each holds the next token of every sequence."""
        at = len(prompts[0])
        crafted = self._steps(len(prompts), at + len(steps))
        for sequence, prompt in enumerate(prompts):
            self._prompt(crafted, sequence, prompt)
        ready = [
            crafted.step([Row(i, at + step, [token]) for i, token in enumerate(tokens)])
            for step, tokens in enumerate(steps)
        ]
        start = time.perf_counter()
        for inputs in ready:
            self._backend.execute(inputs, self._logits)
        return time.perf_counter() - start

    def prefill(self, prompt: list[int]) -> float:
        """Seconds until the prompt's next-token logits are there."""
        crafted = self._steps(1, len(prompt))
        start = time.perf_counter()
        self._prompt(crafted, 0, prompt)
        return time.perf_counter() - start

    def greedy(
        self, prompts: list[list[int]], new_tokens: int, path: str | None = None
    ) -> list[list[int]]:
        """The most likely tokens, one after the other; at most 64 prompts, all together.

        Saves at `path` what `next_logits` along these answers would.
        """
        answers: list[list[int]] = [[] for _ in prompts]
        crafted = self._steps(len(prompts), max(map(len, prompts)) + new_tokens)
        logits = [self._prompts(crafted, prompts)]
        while True:
            for answer, row in zip(answers, logits[-1], strict=True):
                answer.append(int(row.argmax()))
            if len(answers[0]) == new_tokens:
                break
            logits.append(self._next(crafted, prompts, answers))
        if path is not None:
            np.save(path, np.stack(logits, axis=1))
        return answers

    def next_logits(self, prompts: list[list[int]], answers: list[list[int]], path: str) -> None:
        """Save float32 [prompts, answer, vocabulary]: logits behind the prompt and answer[:j]."""
        crafted = self._steps(len(prompts), max(map(len, prompts)) + len(answers[0]))
        logits = [self._prompts(crafted, prompts)]
        for length in range(1, len(answers[0])):
            logits.append(self._next(crafted, prompts, [answer[:length] for answer in answers]))
        np.save(path, np.stack(logits, axis=1))

    def _prompts(self, crafted: CraftedSteps, prompts: list[list[int]]) -> Floats:
        """Compute sequence after sequence; the logits behind each."""
        return np.stack(
            [self._prompt(crafted, i, prompt).copy() for i, prompt in enumerate(prompts)]
        )

    def _next(
        self, crafted: CraftedSteps, prompts: list[list[int]], answers: list[list[int]]
    ) -> Floats:
        """Compute the last token of every answer in one step; the logits behind each."""
        rows = [
            Row(i, len(prompt) + len(answer) - 1, answer[-1:])
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
        self._backend.execute(crafted.step(rows), self._logits)
        return self._logits[: len(rows)].copy()

    def log_likelihood(self, windows: list[list[int]]) -> float:
        """Sum of the log probabilities of every token but each window's first.

        All windows (of equal length, at most 64) go through together, a token at a time, so that
        it is decoding that is scored and the rows of logits suffice.
        """
        length = len(windows[0])
        crafted = self._steps(len(windows), length)
        total = 0.0
        for at in range(length - 1):
            rows = [Row(i, at, [window[at]]) for i, window in enumerate(windows)]
            self._backend.execute(crafted.step(rows), self._logits)
            logits = self._logits[: len(windows)].astype(np.float64)
            top = logits.max(axis=1, keepdims=True)
            norms = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
            targets = [window[at + 1] for window in windows]
            total += float((logits[np.arange(len(windows)), targets] - norms).sum())
        return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--plan", choices=("auto", "eager"), default="auto")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    lane = TriptychLane(args.model, args.plan, args.threads)
    names = ("info", "decode", "prefill", "next_logits", "greedy", "log_likelihood")
    answer_requests({name: getattr(lane, name) for name in names})


if __name__ == "__main__":
    main()
