"""Which bytes of the packed weights lie on which memory node, on made-up machines."""

import errno
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from step_driver import StepDriver
from tiny_models import save, tiny_model
from triptych.kernels.cpu import panel_shares
from triptych.services.executor import near_weights, weight_cache
from triptych.services.executor.backend import BackendOptions, open_backend
from triptych.services.executor.memory_nodes import MemoryNode
from triptych.services.executor.near_weights import NearMemory, Run, near_memory, pages_of, runs_of
from triptych.services.executor.packed_weights import (
    Place,
    anonymous_memory,
    parts_of,
    places_of,
    total_bytes,
)
from triptych.services.executor.raw_weights import open_raw_weights
from triptych.services.runtime.model_files import resolve_model

PAGE = mmap.PAGESIZE
SIZES: dict[str, object] = {"hidden_size": 192, "intermediate_size": 416, "vocab_size": 608}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save(tiny_model("llama", SIZES), path)
    return path


@pytest.fixture(scope="module")
def places(folder: Path) -> list[Place]:
    source = open_raw_weights(resolve_model(str(folder)))
    return places_of(parts_of(source.config), source)


def two_nodes() -> tuple[MemoryNode, ...]:
    """The cores of this process dealt out to two nodes; both have the one where there is one."""
    cores = sorted(os.sched_getaffinity(0))
    return (MemoryNode(0, frozenset(cores[:1])), MemoryNode(1, frozenset(cores[-1:])))


def test_panels_are_shared_out_whole() -> None:
    for threads in (1, 2, 3, 7):
        for gate in (False, True):
            shares = panel_shares([576, 192, 200], threads, gate)
            for matrix, panels in enumerate((36, 12, 13)):
                taken = [
                    panel for spans in shares for panel in range(*spans[matrix])
                ]  # thread after thread
                assert taken == list(range(panels))
    # q, k and v are one run: 60 panels, 30 each.
    assert panel_shares([576, 192, 192], 2, False) == [
        [(0, 30), (0, 0), (0, 0)],
        [(30, 36), (0, 12), (0, 12)],
    ]
    # Gate and up are cut where a block of 32 columns ends.
    assert panel_shares([5 * 16], 2, True) == [[(0, 2)], [(2, 5)]]


@pytest.mark.parametrize("node_of", [(0, 1), (0, 0, 1, 1), (1, 0, 1), (0, 1, 2)])
def test_each_matrix_lies_with_the_threads_that_multiply_it(
    places: list[Place], node_of: tuple[int, ...]
) -> None:
    owner = np.full(total_bytes(places), -1, np.int8)
    for run in runs_of(places, node_of):
        assert (owner[run.begin : run.end] == -1).all()
        owner[run.begin : run.end] = run.node
    threads = len(node_of)
    for place in places:
        layer, _, name = place.part.name.rpartition(".")
        owners = owner[place.offset : place.offset + place.num_bytes]
        if not place.is_matrix or name == "embedding":
            assert (owners == -1).all()
            continue
        rows = {each.part.name: each.part.shape[0] for each in places}
        joint = [f"{layer}.{n}" for n in "qkv"] if name in ("q", "k", "v") else [place.part.name]
        shares = panel_shares([rows[each] for each in joint], threads, name in ("gate", "up"))
        by_panel = owners.reshape(-(-rows[place.part.name] // 16), -1)
        for thread, spans in enumerate(shares):
            first, last = spans[joint.index(place.part.name)]
            assert (by_panel[first:last] == node_of[thread]).all()


def test_pages_at_borders_go_to_who_has_most() -> None:
    runs = [Run(0, PAGE + 10, 0), Run(PAGE + 10, 3 * PAGE, 1), Run(3 * PAGE, 4 * PAGE - 9, 0)]
    assert pages_of(runs, 0) == [(0, 1), (3, 4)]
    assert pages_of(runs, 1) == [(1, 3)]
    assert pages_of([Run(10, 20, 0)], 0) == []


def test_pages_are_first_written_on_their_node(
    places: list[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a thread that may run on that node only."""
    nodes = two_nodes()
    near = near_memory(places, 2, [min(node.cores) for node in nodes], nodes)
    assert near is not None
    wrote: list[tuple[int, set[int]]] = []
    touch = NearMemory._touch

    def spy(self: NearMemory, memory: NDArray[np.uint8], node: int) -> None:
        touch(self, memory, node)
        wrote.append((node, os.sched_getaffinity(threading.get_native_id())))

    monkeypatch.setattr(NearMemory, "_touch", spy)
    before = os.sched_getaffinity(0)
    memory = near.allocate(total_bytes(places))
    assert sorted(wrote) == [(index, set(node.cores)) for index, node in enumerate(nodes)]
    assert os.sched_getaffinity(0) == before
    assert not memory.any()
    pages = sum(last - first for node in (0, 1) for first, last in pages_of(near.runs, node))
    assert resident_pages(memory) >= pages > 0


def test_a_kernel_without_huge_pages(places: list[Place], monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows no such advice, and answers EINVAL."""
    asked = []

    class Area(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            asked.append(option)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(mmap, "mmap", Area)
    size = 4 * near_weights._HUGE_PAGE
    near = NearMemory((Run(0, size, 0),), two_nodes())
    for memory in (near.allocate(size), anonymous_memory(size)):
        assert memory.shape == (size,)
        assert not memory.any()
    assert set(asked) == {mmap.MADV_NOHUGEPAGE, mmap.MADV_HUGEPAGE}


def resident_pages(memory: NDArray[np.uint8]) -> int:
    """Pages of the array that are in memory; its map may be in pieces."""
    first, last = memory.ctypes.data, memory.ctypes.data + memory.size
    inside, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            start, end = (int(each, 16) for each in name.split("-"))
            inside = start < last and first < end
        elif inside and name == "Rss:":
            total += int(rest[0]) * 1024 // PAGE
    return total


@pytest.mark.parametrize("cache", ["off", "fresh", "cached"])
def test_the_same_bits_as_on_one_node(
    folder: Path, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_cache, "SMALLEST_BYTES", 1)
    nodes = two_nodes()
    cores = tuple(min(node.cores) for node in nodes)
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, 608, 90)]

    def logits(nodes: tuple[MemoryNode, ...]) -> NDArray[np.float32]:
        options = BackendOptions(
            plan="native", kv_cache_memory=1 << 21, threads=2, affinity=cores, nodes=nodes,
            weight_cache=None if cache == "off" else tmp_path / "cache",
        )  # fmt: skip
        return StepDriver(open_backend(resolve_model(str(folder)), options)).run(tokens)

    if cache == "cached":
        logits(())
    near, plain = logits(nodes), logits(())
    np.testing.assert_array_equal(near.view(np.uint32), plain.view(np.uint32))


def test_nothing_is_copied_on_one_node(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: NearMemory, size: int) -> NDArray[np.uint8]:
        raise AssertionError

    monkeypatch.setattr(weight_cache, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(near_weights.NearMemory, "allocate", never)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    for nodes in ((), (MemoryNode(0, frozenset(cores)),)):
        for weights in (None, tmp_path / "cache", tmp_path / "cache"):
            options = BackendOptions(
                plan="native", kv_cache_memory=1 << 21, threads=len(cores), affinity=cores,
                nodes=nodes, weight_cache=weights,
            )  # fmt: skip
            open_backend(resolve_model(str(folder)), options)
