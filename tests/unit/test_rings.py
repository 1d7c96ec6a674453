"""services/transport/rings.py: what is refused, what is in place, what closing means."""

import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

from triptych.engine_core.layout import RING_HEADER, STEP_HEADER, LogitsLayout, StepLayout
from triptych.services.transport.rings import SEALS, LogitsRing, RingError, SlotPool, StepRing

STEP = StepLayout(num_slots=2, max_tokens=8, max_rows=3, max_blocks_per_row=4, max_logits=3)
LOGITS = LogitsLayout(num_slots=2, max_logits=3, vocabulary_size=11)
EPOCH = 2**63 + 5


def memory_file(header: bytes, size: int, seals: int = SEALS) -> int:
    fd = os.memfd_create("forged", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    os.pwrite(fd, header, 0)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def changed(header: bytes, field: int, value: int) -> bytes:
    values = list(RING_HEADER.unpack(header))
    values[field] = value
    return RING_HEADER.pack(*values)


def test_logits_are_read_where_they_were_written() -> None:
    writer = LogitsRing.create(LOGITS, EPOCH)
    reader = LogitsRing.attach(os.dup(writer.fd), LOGITS, EPOCH)
    writer.logits(1)[:2] = np.arange(22, dtype=np.float32).reshape(2, 11)
    writer.publish(1, step_id=7, num_rows=2)
    rows = reader.rows(1, step_id=7, num_rows=2)
    assert rows.shape == (2, 11)
    assert rows.dtype == np.float32
    assert not rows.flags.owndata
    assert not rows.flags.writeable
    np.testing.assert_array_equal(rows.ravel(), np.arange(22))
    writer.logits(1)[0, 0] = 99  # no copy lies between the two
    assert rows[0, 0] == 99
    del rows
    assert reader.close()
    assert writer.close()


def test_logits_of_another_step_are_refused() -> None:
    ring = LogitsRing.create(LOGITS, EPOCH)
    ring.publish(0, step_id=7, num_rows=2)
    with pytest.raises(RingError, match="holds step 7 with 2 rows, expected step 8 with 2"):
        ring.rows(0, step_id=8, num_rows=2)
    with pytest.raises(RingError, match="expected step 7 with 3"):
        ring.rows(0, step_id=7, num_rows=3)
    ring.close()


def test_step_inputs_of_another_step_are_refused() -> None:
    ring = StepRing.create(STEP, EPOCH)
    reader = StepRing.attach(os.dup(ring.fd), STEP, EPOCH)
    STEP_HEADER.pack_into(ring.slot(1), 0, 12, 8, 3, 2, 0)
    assert reader.inputs(1, 12) == ring.slot(1)
    with pytest.raises(RingError, match="holds step 12, expected 13"):
        reader.inputs(1, 13)
    for slot in (-1, 2):
        with pytest.raises(RingError, match="no step slot"):
            reader.inputs(slot, 12)
    with pytest.raises(TypeError):
        reader.slot(1)[0] = 1  # the reader cannot write
    reader.close()
    ring.close()


def test_slots_do_not_overlap() -> None:
    ring = StepRing.create(STEP, EPOCH)
    ring.slot(0)[:] = b"\x11" * STEP.slot_bytes
    ring.slot(1)[:] = b"\x22" * STEP.slot_bytes
    assert set(ring.slot(0)) == {0x11}
    assert set(ring.slot(1)) == {0x22}
    ring.close()


@pytest.mark.parametrize(
    ("field", "name"),
    [(0, "magic"), (1, "layout_version"), (2, "kind"), (3, "epoch"), (4, "num_slots"),
     (6, "max_rows"), (8, "vocabulary_size")],
)  # fmt: skip
def test_attach_refuses_a_header_that_differs(field: int, name: str) -> None:
    fd = memory_file(changed(LOGITS.header(EPOCH), field, 1234), LOGITS.total_bytes)
    with pytest.raises(RingError, match=f"{name} is 0x4d2"):
        LogitsRing.attach(fd, LOGITS, EPOCH)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)  # attach took it over


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SEAL, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_GROW])
def test_attach_refuses_an_unsealed_file(seals: int) -> None:
    fd = memory_file(STEP.header(EPOCH), STEP.total_bytes, seals)
    with pytest.raises(RingError, match="seals are"):
        StepRing.attach(fd, STEP, EPOCH)


@pytest.mark.parametrize("size", [4096, STEP.total_bytes - 1, STEP.total_bytes + 4096])
def test_attach_refuses_another_size(size: int) -> None:
    fd = memory_file(STEP.header(EPOCH), size)
    with pytest.raises(RingError, match=f"it has {size} bytes, expected {STEP.total_bytes}"):
        StepRing.attach(fd, STEP, EPOCH)


def test_attach_refuses_what_is_no_memory_file(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(RingError, match="not a memory file"):
        StepRing.attach(read, STEP, EPOCH)
    file = tmp_path / "ring"
    file.write_bytes(STEP.header(EPOCH).ljust(STEP.total_bytes, b"\0"))
    with pytest.raises(RingError, match="seals"):
        StepRing.attach(os.open(file, os.O_RDWR), STEP, EPOCH)


def test_a_sealed_ring_cannot_be_cut() -> None:
    ring = StepRing.create(STEP, EPOCH)
    for size in (0, STEP.total_bytes - 1, STEP.total_bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(ring.fd, size)
    ring.close()


def test_closing_with_views_out_keeps_the_views() -> None:
    ring = LogitsRing.create(LOGITS, EPOCH)
    view = ring.logits(0)
    view[0, 0] = 5
    assert not ring.close()
    assert ring.close()  # twice is no error
    assert view[0, 0] == 5
    with pytest.raises(RingError, match="closed"):
        ring.logits(0)
    del view
    assert mapped_rings() == 0


def test_closing_step_views() -> None:
    ring = StepRing.create(STEP, EPOCH)
    array = np.frombuffer(ring.slot(0), np.int32)
    assert not ring.close()
    with pytest.raises(RingError, match="closed"):
        ring.slot(0)
    assert array[0] == 0
    del array
    assert mapped_rings() == 0


def mapped_rings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:triptych-")


def test_too_large_a_ring_is_an_error() -> None:
    layout = LogitsLayout(num_slots=16, max_logits=4096, vocabulary_size=2**31)
    with pytest.raises(RingError, match="cannot create triptych-logits of"):
        LogitsRing.create(layout, EPOCH)


def test_slot_pool() -> None:
    pool = SlotPool(2)
    first, second = pool.lease(), pool.lease()
    assert {first, second} == {0, 1}
    assert pool.lease() is None
    assert pool.free == 0
    pool.release(1)
    assert pool.free == 1
    with pytest.raises(AssertionError, match="not leased"):
        pool.release(1)
    with pytest.raises(AssertionError, match="no slot"):
        pool.release(2)
