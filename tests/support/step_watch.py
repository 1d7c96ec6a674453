"""A witness of what executors compute: reads the step ring over the shoulder of the scheduler."""

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from triptych.engine_core.layout import (
    RING_HEADER,
    RING_HEADER_FIELDS,
    STEP_HEADER,
    StepLayout,
)

_LOOK_SECONDS = 0.0002


class StepWatch:
    """The step ring of a scheduler process, mapped for reading. Torn reads are possible."""

    def __init__(self, pid: int) -> None:
        """Raises FileNotFoundError where the process has none yet, or one that is being made."""
        fd = os.open(_ring_of(pid), os.O_RDONLY)
        try:
            if os.fstat(fd).st_size < RING_HEADER.size:
                raise FileNotFoundError(f"the step ring of process {pid} has no size yet")
            self._mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        packed = RING_HEADER.unpack(self._mapping[: RING_HEADER.size])
        facts = dict(zip(RING_HEADER_FIELDS, packed, strict=True))
        if not facts["max_logits"]:
            raise FileNotFoundError(f"the step ring of process {pid} has no header yet")
        self._layout = StepLayout(
            num_slots=facts["num_slots"], max_tokens=facts["max_tokens"],
            max_rows=facts["max_rows"], max_blocks_per_row=facts["max_blocks_per_row"],
            max_logits=facts["max_logits"],
        )  # fmt: skip

    def last_has(self, token_id: int) -> bool:
        """Whether the step that was written last computes this token."""
        with_it = self.steps()
        return token_id in with_it[max(with_it)]

    def steps(self) -> dict[int, set[int]]:
        """The steps in the ring by their ids, with the tokens that they compute."""
        found = {}
        for slot in range(self._layout.num_slots):
            start = self._layout.slot_offset(slot)
            step_id, num_tokens, *_ = STEP_HEADER.unpack_from(self._mapping, start)
            offset, _ = self._layout.arrays["token_ids"]
            count = min(num_tokens, self._layout.max_tokens)
            ids = np.frombuffer(self._mapping, np.int32, count, start + offset)
            found[step_id] = set(ids.tolist())
        return found


def _ring_of(pid: int) -> Path:
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "memfd:triptych-step" in str(fd.readlink()):
                return fd
        except FileNotFoundError:
            continue
    raise FileNotFoundError(f"process {pid} has no step ring")


@contextmanager
def at_each_step_with(
    token_id: int, scheduler: int, call: Callable[[Callable[[], bool]], bool]
) -> Iterator[None]:
    """Within, `call` is called when a step computes the token: until it returns True, and then not
    before there is the ring of another executor. It is given what says whether the last step in the
    ring still is one that does."""
    stop = threading.Event()

    def look() -> None:
        called: int | None = None  # the ring for which it was
        seen: tuple[int, StepWatch] | None = None
        while not stop.wait(_LOOK_SECONDS):
            try:
                ring = _ring_of(scheduler).stat().st_ino
                if seen is None or seen[0] != ring:
                    seen = ring, StepWatch(scheduler)
            except FileNotFoundError:
                continue
            still = partial(seen[1].last_has, token_id)
            if ring != called and still() and call(still):
                called = ring

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
