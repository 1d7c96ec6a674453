"""llama.cpp in a process of its own, driven through the C API of llama-cpp-python.

Runs in the peer's environment (numpy and llama_cpp, nothing of ours). The served workload is a
continuous-batching loop in the manner of llama.cpp's own server, without the cost of HTTP: each
step takes the next token of every running sequence, then as much of the waiting prompts as fits.
"""

import argparse
import ctypes
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import llama_cpp
import numpy as np
from numpy.typing import NDArray
from protocol import answer_requests

BATCH = 2048  # tokens in a call, the default of llama.cpp's tools; it computes 512 at a time
WINDOW = 512  # tokens at most of a text whose every token is scored
Floats = NDArray[np.float32]


@llama_cpp.llama_log_callback
def quiet(level: int, text: bytes, data: object) -> None:
    """Drops what llama.cpp logs; its errors come back as codes."""


class Batch:
    """The arrays of a llama_batch, filled in place."""

    def __init__(self, capacity: int) -> None:
        self.size = 0
        self.tokens, self.positions, self.sequences, ones = (
            np.zeros(capacity, np.int32) for _ in range(4)
        )
        ones[:] = 1
        self.outputs = np.zeros(capacity, np.int8)
        int32 = ctypes.POINTER(ctypes.c_int32)
        first = self.sequences.ctypes.data
        pointers = (int32 * capacity)(*(ctypes.cast(first + 4 * i, int32) for i in range(capacity)))
        self._kept = (ones, pointers)
        self.struct = llama_cpp.llama_batch(
            n_tokens=0,
            token=self.tokens.ctypes.data_as(int32),
            embd=None,
            pos=self.positions.ctypes.data_as(int32),
            n_seq_id=ones.ctypes.data_as(int32),
            seq_id=pointers,
            logits=self.outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def clear(self) -> None:
        self.size = 0

    def add(self, sequence: int, start: int, tokens: list[int], output: str) -> None:
        """Append tokens of a sequence from position `start`; logits of "all", "last" or "none"."""
        span = slice(self.size, self.size + len(tokens))
        self.tokens[span] = tokens
        self.positions[span] = range(start, start + len(tokens))
        self.sequences[span] = sequence
        self.outputs[span] = output == "all"
        self.size = span.stop
        if output == "last":
            self.outputs[self.size - 1] = 1


class Context:
    """A llama.cpp context with F16 keys and values for `sequences` of up to `length` tokens."""

    def __init__(
        self, model: object, sequences: int, length: int, threads: int, unified: bool
    ) -> None:
        """`length` 0 stands for one window of which every token has logits (`WINDOW` at most)."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * (length or WINDOW)
        params.n_batch, params.n_seq_max = BATCH, sequences
        params.n_outputs_max = sequences if length else WINDOW
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = unified
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"no context for {sequences} sequences of {length} tokens")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.batch = Batch(BATCH)
        self.step([(0, 0, [300] * 32, "last")])  # warm up
        self.step([(0, 32, [300], "last")])
        self.clear()

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)

    def remove(self, sequence: int, start: int = 0) -> None:
        """Forget a sequence's keys and values from position `start` on."""
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_seq_rm(memory, sequence, start, -1)

    def step(self, rows: list[tuple[int, int, list[int], str]]) -> Floats:
        """Compute rows (see Batch.add); a view of the outputs' logits [outputs, vocabulary]."""
        batch = self.batch
        batch.clear()
        for row in rows:
            batch.add(*row)
        return self.run()

    def run(self) -> Floats:
        """Compute what the batch holds."""
        batch = self.batch
        batch.struct.n_tokens = batch.size
        code = llama_cpp.llama_decode(self._context, batch.struct)
        if code != 0:
            raise RuntimeError(f"llama_decode of {batch.size} tokens: code {code}")
        llama_cpp.llama_synchronize(self._context)
        outputs = int(batch.outputs[: batch.size].sum())
        if not outputs:
            return np.zeros((0, self._vocabulary), np.float32)
        pointer = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, (outputs, self._vocabulary))

    def free(self) -> None:
        llama_cpp.llama_free(self._context)


@dataclass(slots=True)
class Running:
    """One request of the served workload."""

    prompt: list[int]
    left: int
    sent: float
    computed: int = 0
    token: int = -1
    arrivals: list[float] = field(default_factory=list)


class LlamaLane:
    """The operations. One context is kept from call to call while its shape stays the same."""

    def __init__(self, path: str, threads: int, unified: bool) -> None:
        llama_cpp.llama_log_set(quiet, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise RuntimeError(f"{path}: llama.cpp cannot load it")
        self._threads = threads
        self._unified = unified
        self._context: Context | None = None
        self._shape = (0, 0)

    def _shaped(self, sequences: int, length: int) -> Context:
        length = -(-length // 256) * 256
        if self._context is None or self._shape != (sequences, length):
            if self._context is not None:
                self._context.free()
            self._context = Context(self._model, sequences, length, self._threads, self._unified)
            self._shape = (sequences, length)
        self._context.clear()
        return self._context

    def info(self) -> str:
        """What llama.cpp says of this build and machine."""
        system = llama_cpp.llama_print_system_info().decode()
        return f"llama-cpp-python {llama_cpp.__version__}; {system}"

    def decode(self, prompts: list[list[int]], steps: list[list[int]]) -> float:
        """Seconds that all `steps` take together; each holds the next token of every sequence."""
        context = self._shaped(len(prompts), len(prompts[0]) + len(steps))
        context.step([(i, 0, prompt, "last") for i, prompt in enumerate(prompts)])
        at = len(prompts[0])
        start = time.perf_counter()
        for step, tokens in enumerate(steps):
            context.step([(i, at + step, [token], "last") for i, token in enumerate(tokens)])
        return time.perf_counter() - start

    def prefill(self, prompt: list[int]) -> float:
        """Seconds until the prompt's next-token logits are there."""
        context = self._shaped(1, len(prompt))
        start = time.perf_counter()
        context.step([(0, 0, prompt, "last")])
        return time.perf_counter() - start

    def first_token(self, prompt: list[int]) -> int:
        """The most likely next token."""
        context = self._shaped(1, len(prompt) + 1)
        return int(context.step([(0, 0, prompt, "last")])[0].argmax())

    def first_and_again(self, prompt: list[int], new_tokens: int) -> tuple[float, float]:
        """Seconds to the first of `new_tokens` tokens behind a new prompt, and the same one again.

        The second time as llama.cpp's own server does it when a slot gets a prompt that it holds
        (cache_prompt): keys and values stay where they are, only the last token is computed again.
        """
        context = self._shaped(1, len(prompt) + new_tokens)
        seconds = []
        for kept in (0, len(prompt) - 1):
            start = time.perf_counter()
            context.remove(0, kept)
            token = int(context.step([(0, kept, prompt[kept:], "last")])[0].argmax())
            seconds.append(time.perf_counter() - start)
            for at in range(len(prompt), len(prompt) + new_tokens - 1):
                token = int(context.step([(0, at, [token], "last")])[0].argmax())
        return seconds[0], seconds[1]

    def serve(
        self, requests: list[tuple[list[int], int]], concurrency: int, length: int
    ) -> list[tuple[float, list[float]]]:
        """Answer all requests, `concurrency` at a time: (sent, arrivals) of each."""
        context = self._shaped(concurrency, length)
        waiting, slots, answered = deque(requests), dict[int, Running](), list[Running]()
        while waiting or slots:
            for slot in range(concurrency):
                if slot not in slots and waiting:
                    prompt, new_tokens = waiting.popleft()
                    slots[slot] = Running(prompt, new_tokens, time.perf_counter())
                    answered.append(slots[slot])
            sampling = self._fill(context.batch, slots)
            drawn = context.run().argmax(axis=1)
            now = time.perf_counter()
            for slot, token in zip(sampling, drawn, strict=True):
                running = slots[slot]
                running.token = int(token)
                running.arrivals.append(now)
                running.left -= 1
                if not running.left:
                    context.remove(slot)
                    del slots[slot]
        return [(running.sent, running.arrivals) for running in answered]

    @staticmethod
    def _fill(batch: Batch, slots: dict[int, Running]) -> list[int]:
        """The next step's batch; which slots get logits, in the order of the batch."""
        batch.clear()
        sampling = []
        for slot, running in slots.items():
            if running.arrivals:
                batch.add(slot, running.computed, [running.token], "last")
                running.computed += 1
                sampling.append(slot)
        for slot, running in slots.items():
            chunk = running.prompt[running.computed :][: BATCH - batch.size]
            if running.arrivals or not chunk:
                continue
            running.computed += len(chunk)
            whole = running.computed == len(running.prompt)
            batch.add(slot, running.computed - len(chunk), chunk, "last" if whole else "none")
            if whole:
                sampling.append(slot)
        return sampling

    def next_logits(self, prompts: list[list[int]], answers: list[list[int]], path: str) -> None:
        """Save float32 [prompts, answer, vocabulary]: logits behind the prompt and answer[:j]."""
        np.save(path, np.stack(list(self._behind(prompts, answers))))

    def _behind(self, prompts: list[list[int]], answers: list[list[int]]) -> Iterator[Floats]:
        for prompt, answer in zip(prompts, answers, strict=True):
            context = self._shaped(1, 1024)
            rows = [context.step([(0, 0, prompt, "last")])[0].copy()]
            for i, token in enumerate(answer[:-1]):
                rows.append(context.step([(0, len(prompt) + i, [token], "last")])[0].copy())
            yield np.stack(rows)

    def greedy(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """The most likely tokens, one after the other."""
        answers = []
        for prompt in prompts:
            context = self._shaped(1, 1024)
            answer = [int(context.step([(0, 0, prompt, "last")])[0].argmax())]
            while len(answer) < new_tokens:
                at = len(prompt) + len(answer) - 1
                answer.append(int(context.step([(0, at, answer[-1:], "last")])[0].argmax()))
            answers.append(answer)
        return answers

    def log_likelihood(self, windows: list[list[int]]) -> float:
        """Sum of the log probabilities of every token but each window's first."""
        total = 0.0
        for window in windows:
            context = self._shaped(1, 0)
            logits = context.step([(0, 0, window, "all")])[:-1].astype(np.float64)
            top = logits.max(axis=1, keepdims=True)
            norms = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
            total += float((logits[np.arange(len(logits)), window[1:]] - norms).sum())
        return total


def requantize(source: str, destination: str, threads: int) -> None:
    """Write a Q4_0 file with llama.cpp's own quantiser and its defaults for that type."""
    llama_cpp.llama_log_set(quiet, None)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    params.allow_requantize = True
    params.nthread = threads
    code = llama_cpp.llama_model_quantize(
        source.encode(), destination.encode(), ctypes.byref(params)
    )
    if code != 0:
        raise RuntimeError(f"llama_model_quantize: code {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--unified", action="store_true", help="one KV buffer for all sequences")
    parser.add_argument("--requantize", help="write the model as Q4_0 to this file and end")
    args = parser.parse_args()
    if args.requantize:
        requantize(args.model, args.requantize, args.threads)
        return
    lane = LlamaLane(args.model, args.threads, args.unified)
    names = (
        "info", "decode", "prefill", "first_token", "first_and_again", "serve", "next_logits",
        "greedy", "log_likelihood",
    )  # fmt: skip
    answer_requests({name: getattr(lane, name) for name in names})


if __name__ == "__main__":
    main()
