"""Which cores are near which memory, as the kernel tells it (NUMA)."""

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

_SYSFS = Path("/sys/devices/system/node")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryNode:
    """A node and its cores, of those that this process may use."""

    number: int
    cores: frozenset[int]


def read_nodes(usable: Set[int], root: Path = _SYSFS) -> tuple[MemoryNode, ...]:
    """The nodes that have usable cores, by number; empty when the kernel tells nothing of use.

    Nodes of memory alone, and those whose cores this process may not use, are left out.
    """
    nodes = []
    try:
        for number in parse_list((root / "online").read_text()):
            cores = usable & set(parse_list((root / f"node{number}" / "cpulist").read_text()))
            if cores:
                nodes.append(MemoryNode(number, frozenset(cores)))
    except OSError:  # a kernel without NUMA, or a sandbox without sysfs
        return ()
    except ValueError as error:
        _log.warning("the memory nodes in %s cannot be read: %s", root, error)
        return ()
    if sum(len(node.cores) for node in nodes) != len(usable):
        _log.warning("the memory nodes in %s do not cover this process's cores", root)
        return ()
    return tuple(nodes)


def parse_list(text: str) -> list[int]:
    """The kernel's list format: "0-2,8" is [0, 1, 2, 8]; blank is []. Raises ValueError."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        if not part:
            continue
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def node_of_threads(
    threads: int, affinity: Sequence[int], nodes: Sequence[MemoryNode]
) -> tuple[int, ...]:
    """For each thread, the index in `nodes` of the one its core belongs to.

    Empty where nearness means nothing: fewer than two nodes, or threads that are not pinned.
    """
    if len(nodes) < 2 or not affinity:
        return ()
    of_core = {core: index for index, node in enumerate(nodes) for core in node.cores}
    return tuple(of_core[affinity[thread % len(affinity)]] for thread in range(threads))
