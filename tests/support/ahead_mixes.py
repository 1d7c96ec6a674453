"""Requests whose tokens a device draws, or the scheduler, or both; and what they got."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from fake_executor import continuation
from fake_tokenizer import EOS, FakeTokenizer
from scheduler_bench import Engine, MakeEngine
from triptych.engine_core.sampling_params import BeamParams
from triptych.engine_core.step import FinishReason

LONG = tuple(range(1, 41))
WILD: dict[str, Any] = {"temperature": 6.0}
"""Hot enough that the likeliest token is one of many."""


class Wish(NamedTuple):
    """A request of a mix."""

    prompt: Sequence[int]
    max_tokens: int
    params: dict[str, Any]


def wish(*prompt: int, tokens: int = 24, **params: Any) -> Wish:
    return Wish(prompt, tokens, params)


PLAIN = [wish(n, n + 3, n + 1, tokens=20 + n) for n in range(4)]
DRAWN_BY_THE_DEVICE = [
    *PLAIN,
    wish(*LONG, tokens=30),
    wish(1, 2, seed=1, **WILD),
    wish(1, 2, seed=2**63 + 11, top_k=20, top_p=0.9, min_p=0.02, **WILD),
    wish(3, 3, 3, seed=3, repetition_penalty=1.7, **WILD),
    wish(4, 4, seed=4, presence_penalty=1.5, frequency_penalty=0.5, **WILD),
    wish(5, 1, repetition_penalty=0.6, frequency_penalty=-1.0, logprobs=2),
    wish(6, 6, seed=6, logprobs=0, **WILD),
    wish(7, 9, seed=7, logprobs=20, **WILD),
    wish(8, 8, seed=8, n=3, **WILD),
    wish(9, 8, 7, seed=9, stop_token_ids=tuple(range(0, 90, 5)), **WILD),
    wish(2, 7, tokens=1),
    wish(*LONG[:30], seed=10, prompt_logprobs=2, **WILD),
    wish(5, 6, 7, seed=12, min_tokens=9, **WILD),
]
DRAWN_BY_THE_SCHEDULER = [
    wish(1, 5, seed=21, typical_p=0.7, **WILD),
    wish(1, 6, seed=22, top_n_sigma=1.0, **WILD),
    wish(1, 7, seed=23, no_repeat_ngram_size=2, **WILD),
    wish(1, 8, seed=24, logit_bias=((3, 5.0), (9, -4.0)), **WILD),
    wish(1, 9, seed=25, allowed_token_ids=tuple(range(40)), **WILD),
    wish(2, 1, seed=26, bad_words=((3,), (4, 5)), **WILD),
    wish(2, 2, seed=27, logprobs=30, **WILD),
    wish(2, 3, seed=28, repetition_penalty=0.001, logprobs=1),
    wish(2, 4, beam=BeamParams(width=2)),
    wish(
        2, 5, seed=29, grammar=json.dumps({"grammars": [{"json_schema": {"type": "integer"}}]}),
        stop_token_ids=(EOS,), **WILD,
    ),
]  # fmt: skip
HOST_DRAWN = wish(1, 1, tokens=20, seed=2, typical_p=0.5, **WILD)
BOUND = wish(
    2, 5, seed=29, grammar=json.dumps({"grammars": [{"lark_grammar": "start: /[ab]{12}c/"}]}),
    stop_token_ids=(EOS,), **WILD,
)  # fmt: skip
FROM_BOTH = wish(4, 2, seed=31, min_tokens=8, stop_token_ids=tuple(range(0, 90, 7)), **WILD)
"""The scheduler's until it may end, the device's from then on."""
MIX = [*DRAWN_BY_THE_DEVICE, FROM_BOTH, *DRAWN_BY_THE_SCHEDULER, *PLAIN]


class Got(NamedTuple):
    """What a choice got."""

    tokens: list[int]
    finish: FinishReason | None
    error: str
    logprobs: list[tuple[Any, ...]]
    prompt_logprobs: list[tuple[Any, ...]]
    score: float | None


def started(tokenizer: FakeTokenizer, wishes: Sequence[Wish]) -> list[int]:
    """The slots of all choices of these requests, submitted in this order."""
    slots: list[int] = []
    for prompt, max_tokens, params in wishes:
        first = tokenizer.submit(prompt, max_tokens, **params)
        slots += range(first, first + params.get("n", 1))
    return slots


def got(tokenizer: FakeTokenizer, slots: Sequence[int]) -> list[Got]:
    """Wait for all of them."""
    tokenizer.until(lambda: tokenizer.ended(*slots), timeout=60)
    return [
        Got(
            tokenizer.tokens[slot],
            tokenizer.finished.get(slot),
            str(tokenizer.failed.get(slot, "")),
            [_plain(each) for each in tokenizer.logprobs.get(slot, [])],
            _prompt_logprobs(tokenizer, slot),
            tokenizer.scores.get(slot),
        )
        for slot in slots
    ]


def _prompt_logprobs(tokenizer: FakeTokenizer, slot: int) -> list[tuple[Any, ...]]:
    """In the order of positions. Some come again where another core goes on with a request (an
    executor of another kind, or with another pool): whoever hears them puts them where they go."""
    found: dict[int, tuple[Any, ...]] = {}
    for rows in tokenizer.prompt_logprobs.get(slot, []):
        for position, each in enumerate(rows.rows, rows.position):
            assert found.setdefault(position, _plain(each)) == _plain(each)
    return [found[position] for position in sorted(found)]


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_plain(each) for each in value)
    return tuple(value.tolist()) if hasattr(value, "tolist") else value


def until_empty(engine: Engine) -> None:
    """Nothing is left of any request."""
    engine.until_idle()
    engine.until(lambda: engine.stats.grammars_running == 0)
    sampler = engine.loop._steps.sampler
    assert sampler is not None
    assert sampler._sampler.open_sequences == 0
    assert sampler.device is None or len(sampler.device) == 0


def served(
    make_engine: MakeEngine, wishes: Sequence[Wish], settings: dict[str, Any], **options: Any
) -> tuple[list[Got], Engine]:
    """What an engine with such an executor makes of them."""
    engine = make_engine(**settings)
    engine.executor(**options)
    tokenizer = engine.tokenizer()
    tokenizer.tell_vocabulary()
    outcome = got(tokenizer, started(tokenizer, wishes))
    until_empty(engine)
    return outcome, engine


def is_plain(drawn: Sequence[Got]) -> bool:
    """Whether the choices of PLAIN got what they must."""
    return [each.tokens for each in drawn] == [
        continuation(prompt, tokens) for prompt, tokens, _ in PLAIN
    ]
