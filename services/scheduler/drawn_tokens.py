"""What an executor says that it drew, checked against what it was asked."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from triptych.kernels.sampler_params import NO_TOKEN, TokenLogprobs
from triptych.services.scheduler.device_sampling import DeviceSamples
from triptych.v1 import stage_pb2

Scalar = TypeVar("Scalar", bound=np.generic)


def check_nothing_drawn(done: stage_pb2.StepDone) -> None:
    """Raise ValueError if the executor drew tokens that it was not asked for."""
    if done.HasField("drawn") and done.drawn.ByteSize():
        raise ValueError("drawn: the executor draws tokens of a step whose samples are not its own")


def take_drawn(
    drawn: stage_pb2.DrawnTokens, asked: DeviceSamples
) -> tuple[list[int], dict[int, TokenLogprobs]]:
    """A token for each of the step's samples, NO_TOKEN for those that are not the device's; the
    logprobs of those that ask for them, by sample. Raises ValueError for what cannot be."""
    token_ids = _column("token_ids", drawn.token_ids, len(asked.drawn), np.int32)
    if (token_ids[~asked.drawn] != NO_TOKEN).any():
        raise ValueError("drawn.token_ids: a token of a sample that is not the device's")
    _check_ids("token_ids", token_ids, NO_TOKEN, asked.vocabulary_size)
    (wanting,) = np.nonzero(asked.drawn & (asked.logprobs >= 0) & (token_ids != NO_TOKEN))
    logprobs = _logprobs(drawn, len(wanting), asked.logprobs[wanting], asked.vocabulary_size)
    return token_ids.tolist(), dict(zip(wanting.tolist(), logprobs, strict=True))


def _logprobs(
    drawn: stage_pb2.DrawnTokens, count: int, most: NDArray[np.int32], vocabulary_size: int
) -> list[TokenLogprobs]:
    values = _column("logprobs", drawn.logprobs, count, np.float32)
    ranks = _column("ranks", drawn.ranks, count, np.uint32)
    counts = _column("top_counts", drawn.top_counts, count, np.uint32)
    if (counts > most).any():
        raise ValueError("drawn.top_counts: more tokens than were asked for")
    if ((ranks < 1) | (ranks > vocabulary_size)).any():
        raise ValueError(f"drawn.ranks: not within 1 and {vocabulary_size}")
    total = int(counts.sum())
    top_ids = _column("top_ids", drawn.top_ids, total, np.int32)
    top_values = _column("top_logprobs", drawn.top_logprobs, total, np.float32)
    _check_ids("top_ids", top_ids, 0, vocabulary_size)
    if not (np.isfinite(values).all() and np.isfinite(top_values).all()):
        raise ValueError("drawn.logprobs: one is not finite")
    ends = np.cumsum(counts)
    return [
        TokenLogprobs(logprob, rank, top_ids[start:end], top_values[start:end])
        for logprob, rank, start, end in zip(
            values.tolist(), ranks.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True
        )
    ]


def _column(name: str, column: bytes, count: int, dtype: type[Scalar]) -> NDArray[Scalar]:
    if len(column) != 4 * count:
        raise ValueError(f"drawn.{name}: {len(column)} bytes for {count} values")
    return np.frombuffer(column, dtype)


def _check_ids(name: str, ids: NDArray[np.int32], least: int, bound: int) -> None:
    if len(ids) and not (least <= ids.min() and ids.max() < bound):
        raise ValueError(f"drawn.{name}: an id is not within {least} and {bound - 1}")
