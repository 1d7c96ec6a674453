"""How a sampler treats the arrays that it is given: in place, read only, or not at all."""

import gc
import mmap
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from sampler_cases import random_logits
from sampler_sequences import BOTH, MakeSampler, random_params
from triptych.kernels.cpu.sampler import Sampler
from triptych.kernels.sampler_params import SamplerParams


@BOTH
def test_arrays_that_are_refused(make: MakeSampler) -> None:
    sampler = make(8)
    sampler.open(1, SamplerParams(), [], [])
    good = np.zeros((2, 8), np.float32)
    for dtype in ("f8", "f2", "i4", ">f4"):
        with pytest.raises(TypeError, match="logits must have dtype float32, not"):
            sampler.draw(good.astype(dtype), [1], [0])
        with pytest.raises(TypeError, match="logits must have dtype float32, not"):
            sampler.score(good.astype(dtype), [0], [1], 0)
    wide = np.zeros((2, 16), np.float32)
    for logits in (wide[:, ::2], np.zeros((8, 8), np.float32).T, wide[:, :8]):
        with pytest.raises(ValueError, match="C-contiguous"):
            sampler.draw(logits, [1], [0])
    with pytest.raises(ValueError, match="logits must"):
        sampler.draw(np.zeros(8, np.float32), [1], [0])
    with pytest.raises(ValueError, match="rows of 7, fewer than the vocabulary's 8"):
        sampler.draw(np.zeros((2, 7), np.float32), [1], [0])
    for row in (-1, 2):
        with pytest.raises(ValueError, match=f"logits row {row} is not within 0 and 1"):
            sampler.draw(good, [1], [row])
    with pytest.raises(ValueError, match="2 logits_rows, expected 1"):
        sampler.draw(good, [1], [0, 1])
    with pytest.raises(ValueError, match="as many token_ids"):
        sampler.append([1], [])
    for size in (0, -1, 2**19, 2**40):
        with pytest.raises(ValueError, match=f"vocabulary_size {size} is not within 1 and"):
            make(size)


def test_refuses_what_it_could_not_read_in_place() -> None:
    sampler = Sampler(8)
    sampler.open(1, SamplerParams(), [], [])
    misaligned = np.frombuffer(bytearray(4 * 16 + 2), np.float32, 16, offset=2).reshape(2, 8)
    with pytest.raises(ValueError, match="aligned"):
        sampler.draw(misaligned, [1], [0])
    words = np.frombuffer(bytearray(6), np.uint32, 1, offset=2)
    with pytest.raises(ValueError, match="aligned"):
        sampler.draw(np.zeros((1, 8), np.float32), [1], [0], [words])
    with pytest.raises(TypeError):
        sampler.draw([[1.0] * 8], [1], [0])  # type: ignore[arg-type]  # that is the point


@BOTH
def test_no_samples(make: MakeSampler) -> None:
    drawn = make(8).draw(np.zeros((0, 8), np.float32), [], [])
    assert drawn.token_ids.shape == (0,)
    assert drawn.token_ids.dtype == np.int32


def test_reads_a_read_only_mapping(tmp_path: Path) -> None:
    """A write would be a segmentation fault."""
    rng = np.random.default_rng(0)
    logits = random_logits(rng, 24, 4096)
    (tmp_path / "logits").write_bytes(logits.tobytes())
    with (tmp_path / "logits").open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    view = np.frombuffer(mapping, np.float32).reshape(24, 4096)
    assert not view.flags.writeable
    sampler = Sampler(4096)
    for i in range(24):
        sampler.open(i, random_params(rng, 4096), [1, 2], [3])
    drawn = sampler.draw(view, range(24), range(24))
    np.testing.assert_array_equal(
        drawn.token_ids, sampler.draw(logits, range(24), range(24)).token_ids
    )
    np.testing.assert_array_equal(view, logits)


@BOTH
def test_sees_what_another_view_writes(make: MakeSampler) -> None:
    """The scheduler draws from a ring that the executor writes."""
    shared = mmap.mmap(-1, 4 * 4 * 64)
    writer = np.frombuffer(shared, np.float32).reshape(4, 64)
    reader = writer.view()
    reader.flags.writeable = False
    sampler = make(64)
    sampler.open(1, SamplerParams(temperature=0.0), [], [])
    for token in (3, 60):
        writer[:] = 0
        writer[:, token] = 1
        assert sampler.draw(reader, [1, 1, 1, 1], range(4)).token_ids.tolist() == [token] * 4


def test_plain_rows_make_no_objects() -> None:
    sampler = Sampler(49152)
    for i in range(8):
        sampler.open(i, SamplerParams(top_p=0.9, seed=i), [], [])
    logits = np.zeros((8, 49152), np.float32)
    sampler.draw(logits, range(8), range(8))
    gc.collect()
    tracemalloc.start()
    try:
        sampler.draw(logits, range(8), range(8))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4096, "numpy or Python allocated something of the size of a row"


def test_releases_the_gil() -> None:
    """Another thread ticks in the middle of a long call; it could not if the call held the GIL."""
    logits = np.zeros((4, 49152), np.float32)
    sampler = Sampler(49152)
    for i in range(1024):
        sampler.open(i, SamplerParams(top_p=0.9, seed=i), [], [])
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        for _ in range(5):  # a busy machine may not run the ticker in time
            start = time.perf_counter()
            sampler.draw(logits, range(1024), [0, 1, 2, 3] * 256)
            length = time.perf_counter() - start
            middle = [t for t in ticks if start + length / 4 < t < start + 3 * length / 4]
            if middle:
                break
    finally:
        done.set()
        ticker.join()
    assert length > 10 * sys.getswitchinterval(), "the call is too short to tell"
    assert middle
