"""Samples that a device draws, and what the host's samplers say to them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.kernels.reference.sampler import Sampler
from triptych.kernels.sampler_params import SamplerParams, SamplerProtocol


@dataclass(frozen=True)
class Columns:
    """As `kernels.triton.sampler.SampleColumns`."""

    rows: torch.Tensor
    params: torch.Tensor
    history_starts: torch.Tensor
    history_prompts: torch.Tensor
    history: torch.Tensor


@dataclass(frozen=True)
class Ask:
    """A sample: its row, its parameters, its prompt and output."""

    row: int
    params: SamplerParams
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()


def columns(asks: Sequence[Ask]) -> Columns:
    """Of a step with these samples, on the default device."""
    params = np.zeros((len(asks), 12), np.int32)
    for line, ask in zip(params, asks, strict=True):
        p = ask.params
        line[:6].view(np.float32)[:] = (
            p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty,
            p.frequency_penalty,
        )  # fmt: skip
        words = np.array([p.seed & 0xFFFFFFFF, p.seed >> 32, p.choice, len(ask.output)], np.uint32)
        line[6] = p.top_k
        line[7:11] = words.view(np.int32)
        line[11] = p.logprobs
    histories = [ask.prompt + ask.output for ask in asks]
    tensors = (
        [ask.row for ask in asks],
        params,
        np.cumsum([0, *map(len, histories)]),
        [len(ask.prompt) for ask in asks],
        [token for history in histories for token in history] or [0],
    )
    return Columns(*(torch.tensor(np.asarray(t, np.int32)) for t in tensors))


def host_tokens(
    logits: NDArray[np.float32],
    asks: Sequence[Ask],
    vocabulary: int,
    make: Callable[[int], SamplerProtocol] = Sampler,
) -> list[int]:
    """What a sampler of the host draws for them."""
    sampler = make(vocabulary)
    for i, ask in enumerate(asks):
        sampler.open(i, ask.params, ask.prompt, ask.output)
    drawn = sampler.draw(logits, range(len(asks)), [ask.row for ask in asks])
    tokens: list[int] = drawn.token_ids.tolist()
    return tokens


def random_ask(rng: np.random.Generator, rows: int, vocabulary: int) -> Ask:
    """Any that a device draws; ids of the histories may lie outside the vocabulary."""

    def some(*values: float) -> float:
        return float(rng.choice(values))

    def ids() -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(-1, vocabulary + 2, rng.integers(0, 40)))

    penalties = rng.random() < 0.4
    params = SamplerParams(
        temperature=some(0.0, 1e-30, 0.3, 1.0, 1.0, 2.5, 1e30),
        top_k=int(some(0, -1, 1, 2, 5, 20, vocabulary - 1, vocabulary + 5)),
        top_p=some(1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.99, 0.99999),
        min_p=some(0.0, 0.0, 0.02, 0.5, 1.0),
        repetition_penalty=some(1.0, 0.7, 1.3, 1e-38) if penalties else 1.0,
        presence_penalty=some(0.0, -1.5, 0.25) if penalties else 0.0,
        frequency_penalty=some(0.0, 0.1, -0.7) if penalties else 0.0,
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        choice=int(rng.integers(0, 2**32)),
    )
    return Ask(int(rng.integers(0, rows)), params, ids(), ids())
