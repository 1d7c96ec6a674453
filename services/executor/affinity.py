"""Which cores compute threads are pinned to."""

from collections.abc import Sequence, Set

from triptych.services.executor.memory_nodes import MemoryNode, parse_list
from triptych.services.runtime.lifecycle import StartupError


def cores_to_pin(
    setting: str, threads: int, usable: Set[int], nodes: Sequence[MemoryNode] = ()
) -> tuple[int, ...]:
    """Cores for threads in turn; empty: nobody is pinned.

    `setting`: "none", a list like "0-3,8", or "auto", which pins when every usable core gets a
    thread (then a thread that moves can only disturb another), node after node, so that a node's
    threads have neighbouring shares of the work. Raises StartupError for a core that this process
    may not use.
    """
    if setting == "none":
        return ()
    if setting == "auto":
        node_of = {core: node.number for node in nodes for core in node.cores}
        order = sorted(usable, key=lambda core: (node_of.get(core, 0), core))
        return tuple(order) if threads == len(usable) > 1 else ()
    cores = parse_list(setting)
    wrong = [core for core in cores if core not in usable]
    if wrong or not cores:
        raise StartupError(
            f"cpu_affinity {setting!r}: core {wrong[0] if wrong else setting} is not one of the "
            f"{len(usable)} that this process may use"
        )
    return tuple(cores)
