"""top_n_sigma, top_k, typical_p, top_p and min_p in numpy. docs/sampling.md says it in words."""

import math

import numpy as np
from numpy.typing import NDArray

LANES = 16


def kept(
    row: NDArray[np.float32],
    order: NDArray[np.int64],
    distance: NDArray[np.float64],
    *,
    top_n_sigma: float,
    top_k: int,
    typical_p: float,
    top_p: float,
    min_p: float,
) -> NDArray[np.int64]:
    """Which places of `order` may be drawn, ascending; at least one.

    `row` [vocabulary]: no NaN and no +inf. `order`: its finite ids, most likely first.
    `distance`: of those ids from the first, in nats at the row's temperature.
    """
    places = np.arange(len(order))
    if top_n_sigma > 0.0:
        under = float(row[order[0]]) - row[order].astype(np.float64)
        places = places[under <= top_n_sigma * deviation(row)]
    if top_k > 0:
        places = places[:top_k]
    if typical_p < 1.0:
        places = places[_typical(distance[places], typical_p)]
    if top_p < 1.0:
        mass = masses(distance[places])
        before = np.cumsum(mass) - mass
        count = int(np.count_nonzero(before < top_p * float(mass.sum())))
        places = places[: max(1, count)]
    if min_p > 0.0:
        under = distance[places] - distance[places[0]]
        places = places[under <= -math.log(min_p)]
    return places


def masses(distance: NDArray[np.float64]) -> NDArray[np.int64]:
    """Fixed-point probabilities: their sum does not depend on the order of adding."""
    return np.floor(np.exp(-distance) * 2.0**44).astype(np.int64)


def deviation(row: NDArray[np.float32]) -> float:
    """Standard deviation of a row's finite logits, summed in sixteen lanes, a lane in order."""
    finite = row > -np.inf
    under = np.zeros(-(-len(row) // LANES) * LANES)
    under[: len(row)][finite] = float(row.max()) - row[finite].astype(np.float64)
    lanes = under.reshape(-1, LANES)
    total = _in_order(np.cumsum(lanes, axis=0)[-1])
    squares = _in_order(np.cumsum(lanes * lanes, axis=0)[-1])
    count = float(np.count_nonzero(finite))
    mean = total / count
    return math.sqrt(max(squares / count - mean * mean, 0.0))


def _in_order(lanes: NDArray[np.float64]) -> float:
    return float(np.cumsum(lanes)[-1])


def _typical(distance: NDArray[np.float64], typical_p: float) -> NDArray[np.bool_]:
    """Those nearest to the mean distance (the entropy, but for the normaliser) with enough mass."""
    mass = masses(distance)
    some = mass > 0
    moment = int(np.floor(mass[some] * distance[some]).astype(np.int64).sum())
    total = int(mass.sum())
    away = np.abs(distance - float(moment) / float(total))
    order = np.argsort(away, kind="stable")
    reached = np.cumsum(mass[order]).astype(np.float64) >= max(typical_p * float(total), 1.0)
    within: NDArray[np.bool_] = away <= away[order[int(reached.argmax())]]
    return within
