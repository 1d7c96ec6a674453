"""Rows of logits that an engine has lent, mapped read-only.

They are a logits ring with one row a slot (sampler.proto). The numbers of its layout are repeated
here, as this package needs nothing of the engine; a test compares them with the engine's.
"""

import fcntl
import mmap
import os
import stat
import struct
from contextlib import suppress

from triptych.client.errors import SamplerError
from triptych.v1 import sampler_pb2

LAYOUT_VERSION = 4
MAGIC = 0x4843_5954_5049_5254
HEADER_BYTES = 4096
ALIGNMENT = 64
KIND_LOGITS = 2
RING_HEADER = struct.Struct("<QIIQIIIIIIIIIIQQ")
SLOT_HEADER = struct.Struct("<QII")  # ticket, rows, reserved
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class LogitsRows:
    """`num_rows` slots: a ticket and float32 [vocabulary_size] each.

    Takes the descriptor over, and closes it, whatever becomes of it. Raises SamplerError when it is
    not what the offer says, or could be cut short while it is read.
    """

    def __init__(self, fd: int, offer: sampler_pb2.LeaseOffer) -> None:
        try:
            _check_offer(offer)
            self.num_rows = offer.num_rows
            self.sampleable = offer.sampleable_vocabulary
            """Ids below it may be drawn."""
            self._slot_bytes = slot_bytes(offer.vocabulary_size)
            total = HEADER_BYTES + offer.num_rows * self._slot_bytes
            _check_file(fd, total)
            self._mapping = mmap.mmap(
                fd, total, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ
            )
        except OSError as error:
            raise SamplerError(f"the rows cannot be mapped: {error.strerror}") from error
        finally:
            os.close(fd)
        expected = ring_header(offer)
        if self._mapping[: len(expected)] != expected:
            found = RING_HEADER.unpack_from(self._mapping)
            self.close()
            raise SamplerError(
                f"the header of the rows is {found}, expected {RING_HEADER.unpack(expected)}"
            )

    def ticket(self, row: int) -> int:
        """Of what the row holds now."""
        ticket: int = SLOT_HEADER.unpack_from(self._mapping, self._offset(row))[0]
        return ticket

    def logits(self, row: int) -> "memoryview[float]":
        """Float32 [sampleable], in place: the ids that may be drawn."""
        start = self._offset(row) + _aligned(SLOT_HEADER.size)
        return memoryview(self._mapping)[start : start + 4 * self.sampleable].cast("f")

    def close(self) -> None:
        """Unmap. Where somebody still holds a view, the last one to go does it."""
        with suppress(BufferError):  # it goes with the views
            self._mapping.close()

    def _offset(self, row: int) -> int:
        return HEADER_BYTES + row * self._slot_bytes


def slot_bytes(vocabulary_size: int) -> int:
    """Bytes from one row to the next."""
    return _aligned(SLOT_HEADER.size) + _aligned(4 * vocabulary_size)


def ring_header(offer: sampler_pb2.LeaseOffer) -> bytes:
    """What the rows begin with."""
    size = slot_bytes(offer.vocabulary_size)
    return RING_HEADER.pack(
        MAGIC, LAYOUT_VERSION, KIND_LOGITS, offer.epoch, offer.num_rows, 0, 0, 0,
        offer.vocabulary_size, 1, 0, 0, 0, 0, size, HEADER_BYTES + offer.num_rows * size,
    )  # fmt: skip


def _check_offer(offer: sampler_pb2.LeaseOffer) -> None:
    if not offer.num_rows:
        raise SamplerError("the engine offers no rows")
    if not 1 <= offer.sampleable_vocabulary <= offer.vocabulary_size:
        raise SamplerError(
            f"the engine offers {offer.sampleable_vocabulary} ids of {offer.vocabulary_size}"
        )


def _check_file(fd: int, total_bytes: int) -> None:
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        raise SamplerError("the rows' descriptor is not a memory file")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise SamplerError("the rows' descriptor cannot carry seals") from error
    if seals & _SEALS != _SEALS:
        raise SamplerError(f"the rows' seals are {seals:#x}, {_SEALS:#x} are required")
    if facts.st_size != total_bytes:
        raise SamplerError(f"the rows have {facts.st_size} bytes, expected {total_bytes}")


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
