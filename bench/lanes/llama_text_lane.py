"""llama.cpp's grammars and its lookup decoding, in a process of its own.

Runs in the peer's environment, like llama_lane. A grammar comes from llama-cpp-python's converter
of JSON schemas and is used as llama.cpp's own tools use one (common_sampler_sample): a token is
drawn without it, and only if the grammar refuses that token are all candidates put to it. Lookup
decoding is llama-cpp-python's own, LlamaPromptLookupDecoding in Llama.generate.
"""

import argparse
import ctypes
import time

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from llama_lane import Context, Floats, quiet
from protocol import answer_requests

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
LENGTH = 1024  # tokens of a sequence at most


class GrammarSampler:
    """Draws tokens at a temperature, with or without a grammar."""

    def __init__(self, vocab: object, gbnf: str | None, temperature: float, seed: int) -> None:
        size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._all, self._one = np.zeros(size, CANDIDATE), np.zeros(1, CANDIDATE)
        self._ids = np.arange(size, dtype=np.int32)
        self._chain = llama_cpp.llama_sampler_chain_init(
            llama_cpp.llama_sampler_chain_default_params()
        )
        for sampler in (
            llama_cpp.llama_sampler_init_temp(temperature),
            llama_cpp.llama_sampler_init_dist(seed),
        ):
            llama_cpp.llama_sampler_chain_add(self._chain, sampler)
        self._grammar = None
        if gbnf is not None:
            self._grammar = llama_cpp.llama_sampler_init_grammar(vocab, gbnf.encode(), b"root")
            if not self._grammar:
                raise RuntimeError("llama.cpp cannot read the grammar of its own converter")

    def draw(self, logits: Floats) -> int:
        """The next token; the grammar knows of it."""
        token = self._drawn(logits, masked=False)
        if self._grammar is None:
            return token
        self._one[0] = (token, 1.0, 0.0)
        self._apply(self._grammar, self._one)
        if self._one["logit"][0] == -np.inf:
            token = self._drawn(logits, masked=True)
        llama_cpp.llama_sampler_accept(self._grammar, token)
        return token

    def _drawn(self, logits: Floats, *, masked: bool) -> int:
        self._all["id"], self._all["logit"] = self._ids, logits
        if masked:
            self._apply(self._grammar, self._all)
        selected = self._apply(self._chain, self._all)
        return int(self._all["id"][selected])

    @staticmethod
    def _apply(sampler: object, candidates: np.ndarray) -> int:
        array = llama_cpp.llama_token_data_array()
        array.data = ctypes.cast(candidates.ctypes.data, type(array.data))
        array.size, array.selected, array.sorted = len(candidates), -1, False
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
        return int(array.selected)

    def free(self) -> None:
        for sampler in (self._chain, self._grammar):
            if sampler is not None:
                llama_cpp.llama_sampler_free(sampler)


class LlamaTextLane:
    """The operations."""

    def __init__(self, path: str, threads: int) -> None:
        llama_cpp.llama_log_set(quiet, None)
        llama_cpp.llama_backend_init()
        self._path, self._threads = path, threads
        self._llamas: dict[bool, llama_cpp.Llama] = {}
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise RuntimeError(f"{path}: llama.cpp cannot load it")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._context = Context(self._model, 1, LENGTH, threads, unified=False)

    def schema(
        self,
        prompt: list[int],
        new_tokens: int,
        schema: str | None,
        temperature: float,
        seed: int,
    ) -> dict[str, object]:
        """Sample `new_tokens` tokens at most -> them, seconds to the first and from it to the last.

        The seconds to the first count from the schema's text.
        """
        context = self._context
        context.clear()
        start = time.perf_counter()
        gbnf = None
        if schema is not None:
            gbnf = llama_cpp.LlamaGrammar.from_json_schema(schema, verbose=False)._grammar
        sampler = GrammarSampler(self._vocab, gbnf, temperature, seed)
        tokens = [sampler.draw(context.step([(0, 0, prompt, "last")])[0])]
        first = time.perf_counter()
        for at in range(len(prompt), len(prompt) + new_tokens - 1):
            token = sampler.draw(context.step([(0, at, tokens[-1:], "last")])[0])
            if llama_cpp.llama_vocab_is_eog(self._vocab, token):
                break
            tokens.append(token)
        end = time.perf_counter()
        sampler.free()
        return {"tokens": tokens, "first": first - start, "rest": end - first}

    def quote(
        self, prompt: list[int], new_tokens: int, stop: list[int], guesses: int
    ) -> dict[str, object]:
        """Greedy tokens until one of `stop` or `new_tokens` are there -> them, and the seconds from
        the first to the last. `guesses` 0: plain decoding."""
        llama = self._llama(guesses > 0)
        if guesses:
            llama.draft_model = LlamaPromptLookupDecoding(num_pred_tokens=guesses)
        llama.reset()
        tokens: list[int] = []
        first = end = 0.0
        for token in llama.generate(prompt, temp=0.0):
            end = time.perf_counter()
            first = first or end
            if token in stop:
                break
            tokens.append(token)
            if len(tokens) == new_tokens:
                break
        return {"tokens": tokens, "rest": end - first}

    def _llama(self, guesses: bool) -> llama_cpp.Llama:
        if guesses not in self._llamas:
            self._llamas[guesses] = llama_cpp.Llama(
                self._path, n_ctx=LENGTH, n_threads=self._threads, n_threads_batch=self._threads,
                draft_model=LlamaPromptLookupDecoding() if guesses else None, no_perf=True,
                verbose=False,
            )  # fmt: skip
        return self._llamas[guesses]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    lane = LlamaTextLane(args.model, args.threads)
    answer_requests({"schema": lane.schema, "quote": lane.quote})


if __name__ == "__main__":
    main()
