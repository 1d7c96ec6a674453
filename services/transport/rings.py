"""The step ring and the logits ring: sealed memfd regions.

A ring is created by its writer and attached by its reader, which are different calls.

Nothing is left behind by kill -9: the memory goes with the last descriptor. The seals keep a peer
from shrinking the file under us (SIGBUS). Which slot belongs to whom travels in messages
(StepReady, StepDone), never in shared flags; the generation in a slot's header lets the reader
check that the contents are those of the step it was told about.

This module knows the layout, not the meaning, of the arrays.
"""

import fcntl
import mmap
import os
import stat
from collections.abc import Callable

import numpy as np
import psutil
from numpy.typing import NDArray

from triptych.engine_core.layout import (
    LOGITS_HEADER,
    RING_HEADER,
    RING_HEADER_FIELDS,
    STEP_HEADER,
    LogitsLayout,
    StepLayout,
)

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

LogitsView = NDArray[np.float32]
"""Float32 [rows, vocabulary_size], a view into the ring."""


class RingError(Exception):
    """A ring that cannot be made, is not what it should be, or a slot of the wrong generation."""


class _Region:
    """A mapped memfd. `fd` is open until close(), so that it can be sent to the peer."""

    def __init__(self, fd: int, mapping: mmap.mmap) -> None:
        self.fd = fd
        self._mapping: mmap.mmap | None = mapping

    @property
    def mapping(self) -> mmap.mmap:
        if self._mapping is None:
            raise RingError("the ring is closed")
        return self._mapping

    @property
    def closed(self) -> bool:
        return self._mapping is None

    def close(self) -> bool:
        """Unmap; False where somebody still holds a view: the last view to go unmaps then."""
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            return True
        os.close(self.fd)
        try:
            mapping.close()
        except BufferError:
            return False
        return True


def _create(name: str, total_bytes: int, header: bytes) -> _Region:
    available = psutil.virtual_memory().available
    if total_bytes > available:
        # Asked first: the kernel would hand out page after page until it has to kill somebody.
        raise RingError(
            f"cannot create {name} of {total_bytes} bytes: {available} bytes are available"
        )
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, total_bytes)
        # Reserves the pages: too little memory is an error here, not a SIGBUS within a step.
        os.posix_fallocate(fd, 0, total_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        mapping = mmap.mmap(fd, total_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        os.close(fd)
        raise RingError(f"cannot create {name} of {total_bytes} bytes: {error.strerror}") from error
    mapping[: len(header)] = header
    return _Region(fd, mapping)


def _attach(name: str, fd: int, header: bytes) -> _Region:
    """Map a peer's ring read-only after every check. Owns `fd` from here on, even if it raises."""
    try:
        _check_file(name, fd, total_bytes=RING_HEADER.unpack(header)[-1])
        mapping = mmap.mmap(
            fd,
            RING_HEADER.unpack(header)[-1],
            flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
            prot=mmap.PROT_READ,
        )
    except OSError as error:
        os.close(fd)
        raise RingError(f"{name}: cannot map: {error.strerror}") from error
    except RingError:
        os.close(fd)
        raise
    region = _Region(fd, mapping)
    found = RING_HEADER.unpack(mapping[: RING_HEADER.size])
    for field, value, expected in zip(
        RING_HEADER_FIELDS, found, RING_HEADER.unpack(header), strict=True
    ):
        if value != expected:
            region.close()
            raise RingError(f"{name}: {field} is {value:#x}, expected {expected:#x}")
    return region


def _check_file(name: str, fd: int, total_bytes: int) -> None:
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        raise RingError(f"{name}: the descriptor is not a memory file")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise RingError(f"{name}: the descriptor cannot carry seals") from error
    if seals & SEALS != SEALS:
        raise RingError(f"{name}: seals are {seals:#x}, {SEALS:#x} are required")
    if facts.st_size != total_bytes:
        raise RingError(f"{name}: it has {facts.st_size} bytes, expected {total_bytes}")


class StepRing:
    """Inputs of steps. The scheduler creates and writes it, the executor attaches and reads it."""

    def __init__(self, region: _Region, layout: StepLayout) -> None:
        self.layout = layout
        self._region = region
        whole = memoryview(region.mapping)
        self._slots = [
            whole[offset : offset + layout.slot_bytes]
            for offset in map(layout.slot_offset, range(layout.num_slots))
        ]
        whole.release()

    @classmethod
    def create(cls, layout: StepLayout, epoch: int) -> "StepRing":
        """Make the ring, sealed and prefaulted. Raises RingError when memory does not suffice."""
        return cls(_create("triptych-step", layout.total_bytes, layout.header(epoch)), layout)

    @classmethod
    def attach(cls, fd: int, layout: StepLayout, epoch: int) -> "StepRing":
        """Map the peer's ring, read-only; takes the descriptor over. Raises RingError."""
        return cls(_attach("step ring", fd, layout.header(epoch)), layout)

    @property
    def fd(self) -> int:
        """The descriptor to hand to the reader."""
        return self._region.fd

    @property
    def memory(self) -> memoryview:
        """The whole mapping, from a page border on; to be let go of before `close`."""
        return memoryview(self._region.mapping)

    @property
    def inode(self) -> int:
        """The same for all that map this ring, and of no other ring that is mapped."""
        return os.fstat(self._region.fd).st_ino

    def slot(self, slot: int) -> memoryview:
        """All bytes of a slot: uint8 [slot_bytes], writable for the creator only."""
        if self._region.closed:
            raise RingError("the ring is closed")
        if not 0 <= slot < len(self._slots):
            raise RingError(f"no step slot {slot}")
        return self._slots[slot]

    def inputs(self, slot: int, step_id: int) -> memoryview:
        """The slot's bytes, in place. Raises RingError when they are another step's."""
        found = STEP_HEADER.unpack_from(self.slot(slot))[0]
        if found != step_id:
            raise RingError(f"step slot {slot} holds step {found}, expected {step_id}")
        return self.slot(slot)

    def close(self) -> bool:
        """Let go of the memory. Views that others hold stay valid; then it returns False."""
        return _close(self._region, lambda: _release(self._slots))


class LogitsRing:
    """Logits of steps. The executor creates and writes it, the scheduler attaches and reads it."""

    def __init__(self, region: _Region, layout: LogitsLayout) -> None:
        self.layout = layout
        self._region = region
        shape = (layout.max_logits, layout.vocabulary_size)
        count = layout.max_logits * layout.vocabulary_size
        # frombuffer, unlike ndarray(buffer=...), keeps the mapping exported: it cannot be unmapped
        # under a view that somebody still reads.
        self._logits: list[LogitsView] = [
            np.frombuffer(region.mapping, np.float32, count, offset + layout.logits_offset).reshape(
                shape
            )
            for offset in map(layout.slot_offset, range(layout.num_slots))
        ]

    @classmethod
    def create(cls, layout: LogitsLayout, epoch: int) -> "LogitsRing":
        """Make the ring, sealed and prefaulted. Raises RingError when memory does not suffice."""
        return cls(_create("triptych-logits", layout.total_bytes, layout.header(epoch)), layout)

    @classmethod
    def attach(cls, fd: int, layout: LogitsLayout, epoch: int) -> "LogitsRing":
        """Map the peer's ring, read-only; takes the descriptor over. Raises RingError."""
        return cls(_attach("logits ring", fd, layout.header(epoch)), layout)

    @property
    def fd(self) -> int:
        """The descriptor to hand to the reader."""
        return self._region.fd

    @property
    def memory(self) -> memoryview:
        """The whole mapping, from a page border on; to be let go of before `close`."""
        return memoryview(self._region.mapping)

    def logits(self, slot: int) -> LogitsView:
        """Float32 [max_logits, vocabulary_size], in place; writable for the creator only."""
        if self._region.closed:
            raise RingError("the ring is closed")
        if not 0 <= slot < len(self._logits):
            raise RingError(f"no logits slot {slot}")
        return self._logits[slot]

    def publish(self, slot: int, step_id: int, num_rows: int) -> None:
        """Name the step whose logits the slot now holds. Call after the last logit is written."""
        offset = self.layout.slot_offset(slot)
        LOGITS_HEADER.pack_into(self._region.mapping, offset, step_id, num_rows, 0)

    def rows(self, slot: int, step_id: int, num_rows: int) -> LogitsView:
        """The step's logits, float32 [num_rows, vocabulary_size], in place.

        Raises RingError when the slot holds another step's, or another number of rows.
        """
        offset = self.layout.slot_offset(slot)
        found, rows, _ = LOGITS_HEADER.unpack_from(self._region.mapping, offset)
        if (found, rows) != (step_id, num_rows):
            raise RingError(
                f"logits slot {slot} holds step {found} with {rows} rows, "
                f"expected step {step_id} with {num_rows}"
            )
        return self.logits(slot)[:num_rows]

    def close(self) -> bool:
        """Let go of the memory. Views that others hold stay valid; then it returns False."""
        return _close(self._region, self._logits.clear)


def _close(region: _Region, release_views: Callable[[], object]) -> bool:
    if region.closed:
        return True
    release_views()
    return region.close()


def _release(slots: list[memoryview]) -> None:
    for view in slots:
        try:
            view.release()
        except BufferError:  # an array was made over it; it lives as long as that array
            continue
    slots.clear()


class SlotPool:
    """Which slots are free. One is leased when a step is planned, released when it is sampled."""

    def __init__(self, num_slots: int) -> None:
        self.total = num_slots
        self._free = list(range(num_slots))

    @property
    def free(self) -> int:
        """Number of slots nobody holds."""
        return len(self._free)

    def lease(self) -> int | None:
        """Take a slot; None when all are out."""
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        """Give a leased slot back."""
        assert 0 <= slot < self.total, f"no slot {slot}"
        assert slot not in self._free, f"slot {slot} is not leased"
        self._free.append(slot)
