"""Random mixes of requests, every field of sampling in use, prompts that share beginnings.

One generator for a seeded `random.Random` and for hypothesis's `st.randoms()`: what it draws, it
draws from `source`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import BeamParams, EarlyStopping, SamplingParams
from triptych.services.scheduler.logits_processors import LogitsProcessor, ProcessorFactory, Row

ID_STRIDE = 1000
"""Between the ids of two requests: there is room for all choices."""


@dataclass(frozen=True)
class World:
    """What mixes are drawn from. `texts` are token ids; prompts are cut from their beginnings."""

    texts: Sequence[Sequence[int]]
    vocabulary_size: int
    stop_ids: Sequence[int]
    block_size: int = 16
    prompt_tokens: tuple[int, int] = (8, 64)
    max_output: int = 10
    max_beams: int = 3
    choices: Sequence[int] = (1, 1, 1, 1, 2, 3)
    requests: tuple[int, int] = (3, 5)
    fields: Mapping[str, float] = field(default_factory=dict)
    """Chance of a sampling field to be in use; those not named: `usual`."""
    usual: float = 0.2


def random_mix(source: Random, world: World) -> list[Request]:
    """Requests that may be given to a scheduler together."""
    count = source.randint(*world.requests)
    return [random_request(source, world, index) for index in range(count)]


def random_request(source: Random, world: World, index: int) -> Request:
    prompt = random_prompt(source, world)
    return Request(
        request_id=RequestId(index * ID_STRIDE),
        prompt_token_ids=tuple(prompt),
        params=random_params(source, world, prompt),
        priority=source.choice([0, 0, 0, -1, 1]),
        choice=source.choice([0, 0, 0, 5]),
        cache_salt=source.choice(["", "", "", "another"]),
        tenant=source.choice(["", "a", "b"]),
    )


def random_prompt(source: Random, world: World) -> list[int]:
    """The beginning of a text, often near a block's end, sometimes with an end of its own."""
    low, high = world.prompt_tokens
    length = source.randint(low, high)
    if source.random() < 0.5:
        edge = source.randint(math.ceil(low / world.block_size), high // world.block_size)
        length = min(high, max(low, edge * world.block_size + source.randint(-3, 2)))
    prompt = list(source.choice(world.texts)[:length])
    if source.random() < 0.4:
        kept = source.randint(1, len(prompt))
        other = source.choice(world.texts)
        at = source.randrange(max(1, len(other) - high))
        prompt = [*prompt[:kept], *other[at : at + length - kept]]
    return prompt


def overlapping(source: Random, request: Request, world: World, index: int) -> Request:
    """A request whose prompt begins as another's does, and goes on differently."""
    kept = source.randint(1, len(request.prompt_token_ids))
    tail = list(source.choice(world.texts)[: source.randint(1, 20)])
    return Request(
        request_id=RequestId(index * ID_STRIDE),
        prompt_token_ids=(*request.prompt_token_ids[:kept], *tail),
        params=SamplingParams(max_tokens=source.randint(1, 3), temperature=0.0),
        cache_salt=request.cache_salt,
    )


def random_params(source: Random, world: World, prompt: Sequence[int]) -> SamplingParams:
    """Sampling in any of its ways; a beam search now and then."""

    def used(name: str) -> bool:
        return source.random() < world.fields.get(name, world.usual)

    if world.max_beams > 1 and source.random() < world.fields.get("beam", 0.12):
        return _beam_params(source, world)
    found: dict[str, Any] = {
        "max_tokens": source.randint(1, world.max_output),
        "seed": source.getrandbits(64),
        "n": source.choice(world.choices),
        "temperature": source.choice([0.0, 0.3, 0.7, 1.0, 1.0, 1.6]),
    }
    makers: dict[str, Callable[[], Any]] = {
        "min_tokens": lambda: source.randint(0, found["max_tokens"]),
        "top_k": lambda: source.choice([1, 2, 5, 40]),
        "top_p": lambda: source.choice([0.0, 0.3, 0.8, 0.95]),
        "min_p": lambda: source.choice([0.01, 0.1, 0.5]),
        "typical_p": lambda: source.choice([0.2, 0.7, 0.95]),
        "top_n_sigma": lambda: source.choice([0.5, 1.0, 2.0]),
        "repetition_penalty": lambda: source.choice([0.8, 1.1, 2.0]),
        "presence_penalty": lambda: source.choice([-1.0, 0.5, 2.0]),
        "frequency_penalty": lambda: source.choice([-1.0, 0.5, 2.0]),
        "no_repeat_ngram_size": lambda: source.choice([1, 2, 3]),
        "stop_token_ids": lambda: _stops(source, world),
        "logit_bias": lambda: _biases(source, world, prompt),
        "allowed_token_ids": lambda: _allowed(source, world, prompt),
        "bad_words": lambda: _bad_words(source, world, prompt),
        "processors": lambda: (("favour", str(_token(source, world, prompt))),),
        "logprobs": lambda: source.choice([0, 1, 5, 20]),
        "prompt_logprobs": lambda: source.choice([0, 1, 5]),
    }
    for name, make in makers.items():
        if used(name):
            found[name] = make()
    return SamplingParams(**found)


def _beam_params(source: Random, world: World) -> SamplingParams:
    width = source.randint(2, world.max_beams)
    early: EarlyStopping = source.choice(["true", "false", "never"])
    return SamplingParams(
        max_tokens=source.randint(1, max(1, world.max_output - 3)),
        stop_token_ids=_stops(source, world),
        n=source.randint(1, width),
        beam=BeamParams(
            width=width, length_penalty=source.choice([0.0, 1.0, 2.0, -1.0]), early_stopping=early
        ),
    )


def _token(source: Random, world: World, prompt: Sequence[int]) -> int:
    """One that is likely to matter: from the prompt, or from a text."""
    known = prompt if source.random() < 0.5 else source.choice(world.texts)
    return min(int(source.choice(list(known))), world.vocabulary_size - 1)


def _stops(source: Random, world: World) -> tuple[int, ...]:
    count = source.randint(1, min(20, len(world.stop_ids)))
    return tuple(sorted(source.sample(list(world.stop_ids), count)))


def _biases(source: Random, world: World, prompt: Sequence[int]) -> tuple[tuple[int, float], ...]:
    ids = {_token(source, world, prompt) for _ in range(source.randint(1, 8))}
    return tuple((token, source.choice([-100.0, -2.5, 1.5, 4.0, 100.0])) for token in sorted(ids))


def _allowed(source: Random, world: World, prompt: Sequence[int]) -> tuple[int, ...]:
    drawable = [token for token in range(world.vocabulary_size) if token not in world.stop_ids]
    some = source.sample(drawable, min(len(drawable), 40))
    return tuple(sorted({*some, *(_token(source, world, prompt) for _ in range(10))}))


def _bad_words(source: Random, world: World, prompt: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    words = []
    for _ in range(source.randint(1, 5)):
        text = prompt if source.random() < 0.5 else source.choice(world.texts)
        at = source.randrange(len(text))
        word = tuple(text[at : at + source.randint(1, 2)])
        words.append(tuple(min(int(token), world.vocabulary_size - 1) for token in word))
    return tuple(words)


def favour(argument: str) -> LogitsProcessor:
    """A plug-in that depends on all it is given: a token gains with every token of the text."""
    token_id = int(argument)

    def process(prompt_ids: Sequence[int], output_ids: Sequence[int], row: Row) -> None:
        row[token_id] += np.float32(0.02 * len(prompt_ids) + 0.5 * len(output_ids))
        if output_ids:
            row[output_ids[-1]] -= np.float32(1.0)

    return process


PROCESSORS: Mapping[str, ProcessorFactory] = {"favour": favour}
