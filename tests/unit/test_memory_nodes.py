"""The machine's memory nodes, read from made-up sysfs trees."""

from pathlib import Path

import pytest

from triptych.services.executor.affinity import cores_to_pin
from triptych.services.executor.memory_nodes import (
    MemoryNode,
    node_of_threads,
    parse_list,
    read_nodes,
)


def sysfs(root: Path, online: str, **cpulists: str) -> Path:
    """A tree like /sys/devices/system/node."""
    (root / "online").write_text(online + "\n")
    for name, cpulist in cpulists.items():
        (root / name).mkdir()
        (root / name / "cpulist").write_text(cpulist + "\n")
    return root


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("", []), ("\n", []), ("3\n", [3]), ("0-2,8", [0, 1, 2, 8]), ("0,2-2,10-11", [0, 2, 10, 11])],
)
def test_lists(text: str, numbers: list[int]) -> None:
    assert parse_list(text) == numbers


def test_two_sockets_with_hyper_threads(tmp_path: Path) -> None:
    root = sysfs(tmp_path, "0-1", node0="0-3,8-11", node1="4-7,12-15")
    assert read_nodes(set(range(16)), root) == (
        MemoryNode(0, frozenset({0, 1, 2, 3, 8, 9, 10, 11})),
        MemoryNode(1, frozenset({4, 5, 6, 7, 12, 13, 14, 15})),
    )
    # A process that may use few cores, all of one node, sees that node.
    assert read_nodes({5, 12}, root) == (MemoryNode(1, frozenset({5, 12})),)


def test_memory_without_cores_and_numbers_with_gaps(tmp_path: Path) -> None:
    root = sysfs(tmp_path, "0,2,4", node0="0", node2="", node4="1-2")
    assert read_nodes({0, 1, 2}, root) == (
        MemoryNode(0, frozenset({0})),
        MemoryNode(4, frozenset({1, 2})),
    )


@pytest.mark.parametrize(
    ("online", "cpulist", "usable"),
    [("0-1", "0-1", {0, 1}), ("zero", "0-1", {0, 1}), ("0", "0;1", {0, 1}), ("0", "0", {0, 1})],
)
def test_what_makes_no_sense_counts_as_one_node(
    online: str, cpulist: str, usable: set[int], tmp_path: Path
) -> None:
    """A missing folder, words for numbers, cores of no node."""
    assert read_nodes(usable, sysfs(tmp_path, online, node0=cpulist)) == ()
    assert read_nodes(usable, tmp_path / "nowhere") == ()


def test_this_machine() -> None:
    assert sum(len(node.cores) for node in read_nodes({0})) in (0, 1)


ODD_EVEN = (MemoryNode(0, frozenset({0, 2})), MemoryNode(1, frozenset({1, 3})))


def test_auto_pins_node_after_node() -> None:
    assert cores_to_pin("auto", 4, {0, 1, 2, 3}, ODD_EVEN) == (0, 2, 1, 3)
    assert cores_to_pin("auto", 3, {0, 1, 2, 3}, ODD_EVEN) == ()
    assert cores_to_pin("auto", 4, {0, 1, 2, 3}) == (0, 1, 2, 3)
    assert cores_to_pin("3,0", 2, {0, 1, 2, 3}, ODD_EVEN) == (3, 0)


def test_nodes_of_threads() -> None:
    assert node_of_threads(4, (0, 2, 1, 3), ODD_EVEN) == (0, 0, 1, 1)
    assert node_of_threads(5, (3, 0), ODD_EVEN) == (1, 0, 1, 0, 1)
    # Threads that move have no node; one node needs no care.
    assert node_of_threads(4, (), ODD_EVEN) == ()
    assert node_of_threads(2, (0, 2), ODD_EVEN[:1]) == ()
    assert node_of_threads(2, (0, 2), ()) == ()
