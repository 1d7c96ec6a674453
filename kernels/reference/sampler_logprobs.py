"""Logarithms of probabilities from a row or from what is left of it, in numpy and float64."""

import math

import numpy as np
from numpy.typing import NDArray

from triptych.kernels.reference.sampler_filters import masses
from triptych.kernels.sampler_params import TokenLogprobs

LOWEST = float(np.finfo(np.float32).min)


def token_logprobs(
    order: NDArray[np.int64], distance: NDArray[np.float64], token: int, top: int
) -> TokenLogprobs:
    """Of `token` and of the `top` most likely, by the softmax over the ids of `order`.

    `order`: ids, most likely first; `distance`: their nats under one and the same value, which
    the likeliest are not far from. A token that is not among the ids has no probability.
    """
    log_total = math.log(int(masses(distance).sum()) * 2.0**-44)
    values = np.clip(0.0 - distance - log_total, LOWEST, 0.0).astype(np.float32)
    (places,) = np.nonzero(order == token)
    if len(places):
        rank = 1 + int(np.count_nonzero(distance < distance[places[0]]))
        logprob = float(values[places[0]])
    else:
        rank, logprob = 1 + len(order), LOWEST
    return TokenLogprobs(logprob, rank, order[:top].astype(np.int32), values[:top])
