"""The pool of pinned threads, and the limits that bench/kernels.py measures, on small sizes."""

import os

import numpy as np
import pytest

from matmul_cases import aligned_bytes, random_weights
from sampler_cases import using_isa
from triptych.kernels import cpu
from triptych.kernels.cpu import _cpu

CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize("cores", [CORES[:1], CORES[:2], [CORES[0]] * 3], ids=["1", "2", "shared"])
def test_times_products_on_pinned_threads(cores: list[int]) -> None:
    """Three threads on one core only get on because waiting ends in sleep; the caller is free."""
    rng = np.random.default_rng(1)
    matrices = [random_weights(rng, "Q8_0", 48, 64).packed for _ in range(2)]
    x = rng.standard_normal((5, 64)).astype(np.float32)
    seconds = _cpu.time_matmul(matrices, x, cores, rounds=20, per_round=3)
    assert len(seconds) == 20
    assert all(0 < each < 10 for each in seconds)
    assert sorted(os.sched_getaffinity(0)) == CORES


@pytest.mark.parametrize("isa", cpu.supported_isas())
def test_limits_are_rates(isa: str) -> None:
    data = aligned_bytes(1 << 16)
    data[:] = 1
    with using_isa(isa):
        assert _cpu.multiply_add_limit(CORES[:1], 1) > 1e6
        assert _cpu.read_limit(data, CORES[:1], 2, 1 << 15) > 1e6


@pytest.mark.parametrize("core", [-1, 1 << 20])
def test_refuses_a_core_that_is_not_there(core: int) -> None:
    with pytest.raises(ValueError, match=f"may not run on core {core}"):
        _cpu.multiply_add_limit([core], 1)


def test_refuses_nothing_to_measure() -> None:
    with pytest.raises(ValueError, match="cores is empty"):
        _cpu.multiply_add_limit([], 1)
    with pytest.raises(ValueError, match="per_round is not within"):
        _cpu.read_limit(aligned_bytes(512), CORES[:1], 1, 1024)
    with pytest.raises(ValueError, match="matrices or cores are empty"):
        _cpu.time_matmul([], np.zeros((1, 32), np.float32), CORES[:1], 1, 1)
