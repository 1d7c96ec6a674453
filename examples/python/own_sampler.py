"""Draws the tokens itself, from the engine's logits in shared memory: top-k with a seed.

    python own_sampler.py ADDRESS RUN_DIR [PROMPT [MAX_TOKENS [TOP_K [SEED]]]]

TOP_K 1, the default, is greedy. On the engine's machine, as the user that it runs as; RUN_DIR is
its --run-dir. Without numpy here, it is the plain Python that does the same, slower.
"""

import heapq
import math
import random
import sys
from importlib.util import find_spec

from triptych.client.api import Client, ExternalSampler, LogitsRow, SamplingParams, TriptychError


def most_likely_by_numpy(row: LogitsRow, k: int) -> list[int]:
    import numpy as np

    logits = np.asarray(row.logits)  # in place: copy what outlives the draw
    return [*map(int, [logits.argmax()] if k == 1 else np.argsort(-logits, kind="stable")[:k])]


def most_likely_by_hand(row: LogitsRow, k: int) -> list[int]:
    logits = row.logits.tolist()
    return heapq.nlargest(k, range(len(logits)), key=logits.__getitem__)


most_likely = most_likely_by_numpy if find_spec("numpy") else most_likely_by_hand
"""The ids of the k highest logits, the highest first; of equal ones, the lowest id."""


class TopK:
    """Draws among the k most likely tokens."""

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, row: LogitsRow) -> int:
        ids = most_likely(row, self.k)
        highest = row.logits[ids[0]]
        weights = [math.exp(row.logits[each] - highest) for each in ids]
        # Noise of the request and the position alone: a token that is drawn again, because a
        # process of the engine was restarted or a connection broke, is the same.
        noise = random.Random(f"{row.tag} {row.position}")
        return noise.choices(ids, weights)[0]


def main(
    address: str,
    run_dir: str,
    prompt: str = "Once upon a time",
    max_tokens: str = "32",
    top_k: str = "1",
    seed: str = "1",
) -> None:
    """Stream one completion."""
    draw = TopK(int(top_k))
    with Client(address) as client, ExternalSampler(run_dir, draw, num_rows=1) as sampler:
        params = sampler.params(SamplingParams(max_tokens=int(max_tokens)), tag=int(seed))
        tokens = 0
        for piece in client.generate(prompt, params):
            print(piece.text, end="", flush=True)
            tokens += len(piece.token_ids)
        print(f"\n[{tokens} tokens]")


if __name__ == "__main__":
    if not 2 <= len(sys.argv) - 1 <= 6:
        sys.exit("usage: own_sampler.py ADDRESS RUN_DIR [PROMPT [MAX_TOKENS [TOP_K [SEED]]]]")
    try:
        main(*sys.argv[1:])
    except TriptychError as error:
        sys.exit(f"own_sampler: {error.code.name}: {error}")
