"""llama.cpp's sampler chain in a process of its own, on given rows of logits.

Runs in the peer's environment (numpy and llama_cpp, nothing of ours). What is timed is
llama_sampler_apply alone: filling the array of candidates, which llama.cpp does before it for every
row, is not.
"""

import argparse
import ctypes
import time
from pathlib import Path

import llama_cpp
import numpy as np
from protocol import answer_requests

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


def chain_of(params: dict[str, float], history: list[int], vocabulary: int) -> object:
    """The samplers that a request needs, in llama.cpp's own order."""
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())

    def add(sampler: object) -> None:
        llama_cpp.llama_sampler_chain_add(chain, sampler)

    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    penalties = [params[name] for name in names]
    if penalties != [1.0, 0.0, 0.0]:
        add(llama_cpp.llama_sampler_init_penalties(vocabulary, len(history), *penalties))
    if params["temperature"] == 0.0:
        add(llama_cpp.llama_sampler_init_greedy())
    else:
        if params["top_n_sigma"] > 0.0:
            add(llama_cpp.llama_sampler_init_top_n_sigma(params["top_n_sigma"]))
        if params["top_k"] > 0:
            add(llama_cpp.llama_sampler_init_top_k(int(params["top_k"])))
        if params["typical_p"] < 1.0:
            add(llama_cpp.llama_sampler_init_typical(params["typical_p"], 1))
        if params["top_p"] < 1.0:
            add(llama_cpp.llama_sampler_init_top_p(params["top_p"], 1))
        if params["min_p"] > 0.0:
            add(llama_cpp.llama_sampler_init_min_p(params["min_p"], 1))
        add(llama_cpp.llama_sampler_init_temp(params["temperature"]))
        add(llama_cpp.llama_sampler_init_dist(1))
    for token in history:
        llama_cpp.llama_sampler_accept(chain, token)
    return chain


def sample(logits: str, params: dict[str, float], history: list[int]) -> dict[str, object]:
    """One token a row of the file -> the tokens, and the microseconds of a row."""
    rows = np.load(logits, mmap_mode="r")
    chain = chain_of(params, history, rows.shape[1])
    candidates = np.zeros(rows.shape[1], CANDIDATE)
    array = llama_cpp.llama_token_data_array()
    tokens, seconds = [], 0.0
    for row in rows:
        candidates["id"], candidates["logit"] = np.arange(rows.shape[1]), row
        array.data = ctypes.cast(candidates.ctypes.data, type(array.data))
        array.size, array.selected, array.sorted = rows.shape[1], -1, False
        start = time.perf_counter()
        llama_cpp.llama_sampler_apply(chain, ctypes.byref(array))
        seconds += time.perf_counter() - start
        tokens.append(int(candidates["id"][array.selected]))
    llama_cpp.llama_sampler_free(chain)
    return {"tokens": tokens, "microseconds": seconds / len(rows) * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="has the files of logits")
    folder: Path = parser.parse_args().folder
    answer_requests({"sample": lambda logits, **rest: sample(str(folder / logits), **rest)})


if __name__ == "__main__":
    main()
