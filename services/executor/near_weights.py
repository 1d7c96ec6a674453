"""Packed weights in the memory of the node whose threads multiply them.

A thread multiplies the same panels in every step (`panel_shares`), so on a machine of several
memory nodes each panel is wanted by one node only: the weights are one anonymous copy, every page
of which is written first by a thread on the node that will read it, which is where the kernel then
takes it from. No call beyond sched_setaffinity is needed (containers often forbid mbind).

What no thread owns stays where it falls: norms, biases, an untied embedding (a row a token).
"""

import itertools
import mmap
import os
import re
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from triptych.kernels.cpu import panel_shares
from triptych.services.executor.memory_nodes import MemoryNode, node_of_threads
from triptych.services.executor.packed_weights import Place, advise

_PANEL = 16  # rows
_HUGE_PAGE = 2 << 20

Memory = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring bytes [begin, end) of the packed weights that one node's threads multiply.

    `node` is an index, not the kernel's number.
    """

    begin: int
    end: int
    node: int


@dataclass(frozen=True, slots=True)
class NearMemory:
    """How to get memory for packed weights near their threads."""

    runs: tuple[Run, ...]
    nodes: tuple[MemoryNode, ...]

    def allocate(self, size: int) -> Memory:
        """Zeroed memory of `size` bytes whose pages lie on the nodes of `runs`. Raises OSError."""
        area = mmap.mmap(-1, size)
        memory = np.frombuffer(area, np.uint8)
        # A huge page across a border would put one node's panels on the other.
        advise(area, mmap.MADV_NOHUGEPAGE, 0, size)
        for start, length in _huge_pages(self.runs, memory.ctypes.data):
            advise(area, mmap.MADV_HUGEPAGE, start, length)
        with ThreadPoolExecutor(len(self.nodes), thread_name_prefix="node") as pool:
            list(pool.map(self._touch, itertools.repeat(memory), range(len(self.nodes))))
        return memory

    def copy_of(self, mapped: Memory) -> Memory:
        """A near copy of weights in a mapped file, whose pages are let go of on the way."""
        memory = self.allocate(len(mapped))
        source, offset = _mapping(mapped)
        step = 64 * mmap.PAGESIZE
        for start in range(0, len(mapped), step):
            end = min(start + step, len(mapped))
            memory[start:end] = mapped[start:end]
            whole = (end - start) // mmap.PAGESIZE * mmap.PAGESIZE
            if whole:
                source.madvise(mmap.MADV_DONTNEED, offset + start, whole)
        return memory

    def _touch(self, memory: Memory, node: int) -> None:
        pin_this_thread(self.nodes[node].cores)
        for first, last in pages_of(self.runs, node):
            memory[first * mmap.PAGESIZE : last * mmap.PAGESIZE : mmap.PAGESIZE] = 0


def near_memory(
    places: Sequence[Place], threads: int, affinity: Sequence[int], nodes: Sequence[MemoryNode]
) -> NearMemory | None:
    """Where packed weights should lie; None on one node, or for threads that are not pinned."""
    node_of = node_of_threads(threads, affinity, nodes)
    return NearMemory(runs_of(places, node_of), tuple(nodes)) if node_of else None


def runs_of(places: Sequence[Place], node_of: Sequence[int]) -> tuple[Run, ...]:
    """The bytes of all matrices by the node that multiplies them, in order, as long as can be.

    `node_of`: the node of each thread.
    """
    runs: list[Run] = []
    by_name = {place.part.name: place for place in places}
    for names, gate in _multiplied(by_name):
        matrices = [by_name[name] for name in names]
        shares = panel_shares([place.part.shape[0] for place in matrices], len(node_of), gate)
        for node, spans in zip(node_of, shares, strict=True):
            for place, (first, last) in zip(matrices, spans, strict=True):
                panel_bytes = place.num_bytes // -(-place.part.shape[0] // _PANEL)
                begin, end = (place.offset + panel * panel_bytes for panel in (first, last))
                if begin < end:
                    runs.append(Run(begin, end, node))
    runs.sort(key=lambda run: run.begin)
    merged: list[Run] = []
    for run in runs:
        if merged and (merged[-1].end, merged[-1].node) == (run.begin, run.node):
            merged[-1] = Run(merged[-1].begin, run.end, run.node)
        else:
            merged.append(run)
    return tuple(merged)


def pages_of(runs: Sequence[Run], node: int) -> list[tuple[int, int]]:
    """Pages [first, last) of a node. A page that two runs share goes to the one with most of it."""
    page = mmap.PAGESIZE
    rounded = [((run.begin + page // 2) // page, (run.end + page // 2) // page, run.node)
               for run in runs]  # fmt: skip
    return [(first, last) for first, last, owner in rounded if owner == node and first < last]


def pin_this_thread(cores: Set[int]) -> None:
    """Keep the calling thread on these cores."""
    os.sched_setaffinity(0, cores)


def _multiplied(by_name: dict[str, Place]) -> list[tuple[tuple[str, ...], bool]]:
    """Matrices that the plan multiplies as one run of panels, and whether they are gated."""
    together: list[tuple[tuple[str, ...], bool]] = []
    layers = {name.split(".")[0] for name in by_name if re.match(r"\d+\.", name)}
    for layer in sorted(layers, key=int):
        together.append((tuple(f"{layer}.{name}" for name in ("q", "k", "v")), False))
        together += [((f"{layer}.{name}",), False) for name in ("output", "down")]
        together += [((f"{layer}.{name}",), True) for name in ("gate", "up")]
    return [*together, (("head",), False)]


def _huge_pages(runs: Sequence[Run], address: int) -> list[tuple[int, int]]:
    """(offset, length) of the huge pages that lie within a run, for memory at `address`."""
    out = []
    for run in runs:
        first = -(-(address + run.begin) // _HUGE_PAGE) * _HUGE_PAGE
        last = (address + run.end) // _HUGE_PAGE * _HUGE_PAGE
        if first < last:
            out.append((first - address, last - first))
    return out


def _mapping(mapped: Memory) -> tuple[mmap.mmap, int]:
    """The mapped file behind an array, and the array's offset in it."""
    view: object = mapped.base
    assert isinstance(view, memoryview)
    assert isinstance(view.obj, mmap.mmap)
    start = np.frombuffer(view.obj, np.uint8).ctypes.data
    return view.obj, mapped.ctypes.data - start
