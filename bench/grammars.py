"""Microseconds of a step that grammars' masks take, beside those of drawing its tokens.

    make bench-grammars [QUICK=1]

1 and 32 sequences of the scheduler's StepSampler, over the model's vocabulary, each with a JSON
schema and further in a document than the one before; their logits make them go on with it, so that
what is drawn is known. Of every step are timed: `prepare`, which computes the masks (in service
while the executor computes), `draw` with the masks, `draw` of as many sequences without a grammar,
and `drafts`, which asks for forced text. One thread, temperature 0.8.

    masks_CASE_N    us of the masks of a step of N sequences; peer: of drawing it without grammars
    draw_CASE_N     us of drawing it with the masks, over without

CASE is `records` (objects, most of whose text is forced) or `texts` (strings). Medians over the
steps; few masks take long, so the means are printed too. Lower is better; there is no target: that
of structured output is `schema_overhead_*` of bench-peers.
"""

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triptych.engine_core.ids import RequestId
from triptych.engine_core.sampling_params import SamplingParams
from triptych.services.runtime.model_files import resolve_model
from triptych.services.scheduler.grammar_compiler import GrammarCompiler
from triptych.services.scheduler.grammars import Grammars
from triptych.services.scheduler.running_grammars import LAST
from triptych.services.scheduler.sampler import StepSampler, new_sampler
from triptych.services.tokenizer.structured_output.wanted import wanted_grammar
from triptych.services.tokenizer.tokenizer import Tokenizer, load_tokenizer
from triptych.services.transport.vocabulary import Vocabulary
from triptych.v1 import common_pb2

sys.path.insert(0, str(Path(__file__).parent))
from results import Results
from schemas import records_document, records_schema, texts_document, texts_schema
from workload import percentile

SIZES = (1, 32)
APART = 7  # tokens between one sequence's place in the document and the next one's
LIKELY = 1000.0  # logit of the token that is to come
COMPILE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """A schema and a long document of it."""

    schema: dict[str, object]
    document: Callable[[random.Random, int], str]


CASES = {
    "records": Case(records_schema(), records_document),
    "texts": Case(texts_schema(), texts_document),
}


@dataclass(slots=True)
class Times:
    """Microseconds of each step."""

    masks: list[float] = field(default_factory=list)
    drafts: list[float] = field(default_factory=list)
    with_grammars: list[float] = field(default_factory=list)
    without: list[float] = field(default_factory=list)


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """As the tokenizer process tells it."""
    return Vocabulary(
        tuple(map(tokenizer.token_bytes, range(tokenizer.vocabulary_size))),
        tuple(sorted(tokenizer.special_token_ids)),
        tuple(tokenizer.eos_token_ids),
    )


def compiled(grammars: Grammars, done: threading.Event, grammar: str) -> None:
    """Ask for a grammar and wait until it is there."""
    if grammars.ask(grammar, [RequestId(0)]):
        return
    deadline = time.monotonic() + COMPILE_SECONDS
    while time.monotonic() < deadline:
        done.wait(0.1)
        done.clear()
        for each in grammars.take():
            if isinstance(each.outcome, Exception):
                raise each.outcome
            print(f"    compiled in {each.seconds * 1e3:.1f} ms, tables included", flush=True)
            return
    raise RuntimeError(f"no grammar after {COMPILE_SECONDS} s")


class Walk:
    """Sequences that go on with the same document, each from a place of its own."""

    def __init__(
        self, grammars: Grammars, grammar: str, document: Sequence[int], size: int
    ) -> None:
        self._document = document
        self._ids = list(range(size))
        self._at = [1 + APART * each for each in self._ids]
        vocabulary = grammars.vocabulary_size
        rng = np.random.default_rng(size)
        self._noise = (rng.standard_normal((size, vocabulary)) * 2).astype(np.float32)
        self._constrained = StepSampler(
            new_sampler("native", vocabulary, processed_logprobs=False), {}, grammars
        )
        self._plain = StepSampler(new_sampler("native", vocabulary, processed_logprobs=False), {})
        for sampler, text in ((self._constrained, grammar), (self._plain, "")):
            for each, at in zip(self._ids, self._at, strict=True):
                params = SamplingParams(max_tokens=1, temperature=0.8, seed=each, grammar=text)
                sampler.open(each, params, 0, [1], document[:at])

    def step(self, times: Times) -> None:
        """Everyone goes on by a token."""
        expected = [self._document[at] for at in self._at]
        logits = self._logits(expected)
        rows, last = self._ids, [LAST] * len(self._ids)
        times.drafts.append(microseconds(self._constrained.drafts))
        times.masks.append(microseconds(lambda: self._constrained.prepare(self._ids, last)))
        for sampler, spent in (
            (self._plain, times.without), (self._constrained, times.with_grammars)
        ):  # fmt: skip
            begin = time.perf_counter_ns()
            drawn = sampler.draw(logits, self._ids, rows, last)
            spent.append((time.perf_counter_ns() - begin) / 1e3)
            if drawn.errors or drawn.token_ids != expected:
                raise RuntimeError(f"drawn {drawn}, expected {expected}")
            sampler.append(self._ids, drawn.token_ids)
        self._at = [at + 1 for at in self._at]

    def _logits(self, expected: Sequence[int]) -> NDArray[np.float32]:
        logits = self._noise.copy()
        logits[self._ids, expected] = LIKELY
        return logits


def microseconds(call: Callable[[], object]) -> float:
    """Time of one call."""
    begin = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begin) / 1e3


def measure(results: Results, name: str, walk: Walk, size: int, steps: int) -> None:
    """The figures of a case and a number of sequences."""
    times = Times()
    for _ in range(5):
        walk.step(Times())  # warm up
    for _ in range(steps):
        walk.step(times)
    for what, values in (
        ("masks", times.masks), ("draw with", times.with_grammars),
        ("draw without", times.without), ("drafts", times.drafts),
    ):  # fmt: skip
        print(
            f"    {name}, {size:2} sequences, {what:12}: mean {statistics.mean(values):8.1f} us  "
            f"p50 {percentile(values, 0.5):8.1f}  p99 {percentile(values, 0.99):8.1f}",
            flush=True,
        )
    without = statistics.median(times.without)
    results.beside(f"masks_{name}_{size}", statistics.median(times.masks), without)
    results.beside(f"draw_{name}_{size}", statistics.median(times.with_grammars), without)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, type=Path, help="whose vocabulary to use")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    args = parser.parse_args()
    steps = 100 if args.quick else 400
    done = threading.Event()
    compiler = GrammarCompiler(done.set)
    grammars = Grammars(compiler, most=len(CASES), most_bytes=1 << 20)
    grammars.learn(vocabulary_of(load_tokenizer(resolve_model(str(args.model)))))
    results = Results("bench-grammars")
    for name, case in CASES.items():
        raw = common_pb2.StructuredOutput(json_schema=json.dumps(case.schema))
        grammar = wanted_grammar(raw)
        compiled(grammars, done, grammar)
        # Cut as forced text is: masks let no other cut through where a grammar leaves no choice.
        document = grammars.greedy_tokens(case.document(random.Random(name), 100).encode())
        for size in SIZES:
            measure(results, name, Walk(grammars, grammar, document, size), size, steps)
    compiler.close()
    results.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
