"""How the sampler treats what it is given: in place, read only, without the GIL, or not at all."""

import math
import mmap
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from sampler_cases import Logits, random_logits, settings
from triptych.kernels.cpu.sampler import sample, sample_rows
from triptych.kernels.reference.sampler import sample as reference
from triptych.kernels.reference.sampler import sample_rows as reference_rows
from triptych.kernels.sample_columns import SampleColumns, SampleTuple

Sampler = Callable[[Logits, SampleColumns, int], NDArray[np.int32]]
BOTH = pytest.mark.parametrize("sampler", [sample, reference], ids=["cpu", "reference"])


def test_reads_a_read_only_mapping(tmp_path: Path) -> None:
    """A write would be a segmentation fault."""
    logits = random_logits(np.random.default_rng(0), 4, 4096)
    (tmp_path / "logits").write_bytes(logits.tobytes())
    columns = settings(4, top_k=20, top_p=0.9, min_p=0.01, banned=(5,))
    with (tmp_path / "logits").open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    view = np.frombuffer(mapping, np.float32).reshape(4, 4096)
    assert not view.flags.writeable
    np.testing.assert_array_equal(sample(view, columns, 4096), sample(logits, columns, 4096))
    np.testing.assert_array_equal(view, logits)


def test_the_matrix_is_not_copied() -> None:
    logits = random_logits(np.random.default_rng(0), 8, 49152)
    columns = settings(8, top_p=0.9)
    tracemalloc.start()
    try:
        sample(logits, columns, 49152)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16384, "numpy allocated something of the size of a row"


def test_sees_what_another_view_writes() -> None:
    shared = mmap.mmap(-1, 4 * 4 * 64)
    writer = np.frombuffer(shared, np.float32).reshape(4, 64)
    reader = writer.view()
    reader.flags.writeable = False
    for token in (3, 60):
        writer[:] = 0
        writer[:, token] = 1
        assert sample(reader, settings(4, temperature=0), 64).tolist() == [token] * 4


@BOTH
@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, ">f4"])
def test_refuses_another_dtype(sampler: Sampler, dtype: str) -> None:
    with pytest.raises(TypeError, match="logits must have dtype float32, not"):
        sampler(np.zeros((2, 8), dtype), settings(2), 8)


@BOTH
def test_refuses_what_it_would_have_to_copy(sampler: Sampler) -> None:
    wide = np.zeros((2, 16), np.float32)
    for logits in (wide[:, ::2], np.zeros((8, 2), np.float32).T, wide[:, :8]):
        with pytest.raises(ValueError, match="C-contiguous"):
            sampler(logits, settings(len(logits)), 2)


def test_refuses_a_misaligned_matrix() -> None:
    logits = np.frombuffer(bytearray(4 * 16 + 2), np.float32, 16, offset=2).reshape(2, 8)
    with pytest.raises(ValueError, match="aligned"):
        sample(logits, settings(2), 8)


@BOTH
def test_refuses_another_shape(sampler: Sampler) -> None:
    with pytest.raises(ValueError, match="logits must"):
        sampler(np.zeros(8, np.float32), settings(8), 8)
    with pytest.raises(ValueError, match="3 entries, expected 2"):
        sampler(np.zeros((2, 8), np.float32), settings(3), 8)
    for size in (0, -1, 9):
        with pytest.raises(ValueError, match=f"vocabulary_size {size} is not within 1 and"):
            sampler(np.zeros((2, 8), np.float32), settings(2), size)


def test_refuses_what_is_no_array() -> None:
    with pytest.raises(TypeError):
        sample([[1.0, 2.0]], settings(1), 2)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("temperature", [-0.5], "temperature is negative or not finite"),
        ("temperature", [float("nan")], "temperature is negative or not finite"),
        ("temperature", [float("inf")], "temperature is negative or not finite"),
        ("top_p", [1.5], "top_p is not within 0 and 1"),
        ("top_p", [float("nan")], "top_p is not within 0 and 1"),
        ("min_p", [-0.1], "min_p is not within 0 and 1"),
        ("top_k", [1, 2], r"top_k has shape \(2,\), expected \(1,\)"),
        ("banned", [[1], [2]], "banned_starts has shape"),
    ],
)
def test_columns_refuse_bad_values(name: str, values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SampleColumns.of(**({"temperature": [1.0]} | {name: values}))  # type: ignore[arg-type]  # one column per case


def test_columns_refuse_bad_arrays() -> None:
    good = settings(2)
    arrays = {name: getattr(good, name) for name in SampleColumns.__slots__}
    with pytest.raises(TypeError, match="seed must have dtype uint64, not int64"):
        SampleColumns(**(arrays | {"seed": np.zeros(2, np.int64)}))
    with pytest.raises(ValueError, match="C-contiguous"):
        SampleColumns(**(arrays | {"top_k": np.zeros(4, np.int32)[::2]}))
    for starts in ([0, 1, 0], [1, 0, 0], [0, 2, 1]):
        with pytest.raises(ValueError, match="banned_starts must ascend"):
            SampleColumns(**(arrays | {"banned_starts": np.array(starts, np.int32)}))


def test_releases_the_gil() -> None:
    """Another thread ticks in the middle of a long call; it could not if the call held the GIL."""
    logits = np.zeros((256, 49152), np.float32)
    columns = settings(256, top_p=0.9)
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
            sample(logits, columns, 49152)
            length = time.perf_counter() - start
            middle = [t for t in ticks if start + length / 4 < t < start + 3 * length / 4]
            if middle:
                break
    finally:
        done.set()
        ticker.join()
    assert length > 10 * sys.getswitchinterval(), "the call is too short to tell"
    assert middle


def test_rows_as_tuples_draw_the_same_tokens() -> None:
    """`sample_rows`, the scheduler's call, against the columns and against the reference."""
    random = np.random.default_rng(5)
    logits = random.normal(0, 3, (24, 300)).astype(np.float32)
    logits[3, 7] = np.nan
    rows: list[SampleTuple] = [
        (float(random.choice([0.0, 0.7, 1.5])), int(random.integers(-1, 40)),
         float(random.uniform(0.1, 1)), float(random.uniform(0, 0.2)), 2**63 + i, i % 3, i * 7,
         tuple(range(i % 5)))
        for i in range(24)
    ]  # fmt: skip
    tokens = sample_rows(logits, rows, 290)
    assert tokens == sample(logits, SampleColumns.of_rows(rows), 290).tolist()
    assert tokens == reference_rows(logits, rows, 290)
    assert tokens[3] == -1


@pytest.mark.parametrize(
    "row",
    [(-1.0, 0, 1.0, 0.0, 0, 0, 0, ()), (math.nan, 0, 1.0, 0.0, 0, 0, 0, ()),
     (1.0, 0, 1.5, 0.0, 0, 0, 0, ()), (1.0, 0, 1.0, math.nan, 0, 0, 0, ())],
)  # fmt: skip
def test_bad_values_in_a_tuple_are_refused(row: SampleTuple) -> None:
    logits = np.zeros((1, 8), np.float32)
    for sampler in (sample_rows, reference_rows):
        with pytest.raises(ValueError, match=r"temperature|top_p|min_p"):
            sampler(logits, [row], 8)
    with pytest.raises(ValueError, match="each row"):
        sample_rows(logits, [], 8)
