"""Which cores compute threads are pinned to."""

from collections.abc import Set

from triptych.services.runtime.lifecycle import StartupError


def cores_to_pin(setting: str, threads: int, usable: Set[int]) -> tuple[int, ...]:
    """Cores for threads in turn; empty: nobody is pinned.

    `setting`: "none", a list like "0-3,8", or "auto", which pins when every usable core gets a
    thread (then a thread that moves can only disturb another). Raises StartupError for a core that
    this process may not use.
    """
    if setting == "none":
        return ()
    if setting == "auto":
        return tuple(sorted(usable)) if threads == len(usable) > 1 else ()
    cores: list[int] = []
    for part in setting.split(","):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    wrong = [core for core in cores if core not in usable]
    if wrong or not cores:
        raise StartupError(
            f"cpu_affinity {setting!r}: core {wrong[0] if wrong else setting} is not one of the "
            f"{len(usable)} that this process may use"
        )
    return tuple(cores)
