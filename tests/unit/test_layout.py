"""The layout in Python, and the C header that is generated from it, agree."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.engine_core.layout import (
    ALIGNMENT,
    HEADER_BYTES,
    KIND_LOGITS,
    KIND_STEP,
    LAYOUT_VERSION,
    MAGIC,
    RING_HEADER,
    RING_HEADER_FIELDS,
    LogitsLayout,
    StepLayout,
)

SCRIPT = Path(__file__).parents[2] / "scripts" / "layout_header.py"
STEP = StepLayout(
    num_slots=3, max_tokens=37, max_rows=5, max_blocks_per_row=11, max_logits=7, max_samples=9,
    max_history=41, max_transfers=3,
)  # fmt: skip
LOGITS = LogitsLayout(num_slots=3, max_logits=7, vocabulary_size=101)
READER = r"""
#include "layout.h"
#include <stdio.h>

int main(void) {
  triptych_ring_header ring;
  if (fread(&ring, sizeof ring, 1, stdin) != 1 || ring.magic != TRIPTYCH_MAGIC) return 1;
  if (ring.layout_version != TRIPTYCH_LAYOUT_VERSION || ring.kind != TRIPTYCH_KIND_STEP) return 2;
  triptych_step_arrays at = triptych_step_offsets(&ring);
  const uint64_t numbers[] = {
      ring.epoch, ring.num_slots, ring.total_bytes, triptych_slot_offset(&ring, 2), at.token_ids,
      at.positions, at.slots, at.row_starts, at.kv_lengths, at.logits_tokens, at.copy_sources,
      at.copy_targets, at.block_tables, at.store_sources, at.store_targets, at.load_sources,
      at.load_targets, at.sample_rows, at.sample_params, at.history_starts, at.history_prompts,
      at.history, at.host_logits,
      triptych_logits_offset()};
  for (unsigned i = 0; i < sizeof numbers / sizeof *numbers; ++i) {
    printf("%llu\n", (unsigned long long)numbers[i]);
  }
  return 0;
}
"""


def test_ring_headers_say_what_follows() -> None:
    fields = dict(zip(RING_HEADER_FIELDS, RING_HEADER.unpack(STEP.header(9)), strict=True))
    assert fields["magic"] == MAGIC == int.from_bytes(b"TRIPTYCH", "little")
    assert (fields["layout_version"], fields["kind"]) == (LAYOUT_VERSION, KIND_STEP)
    assert (fields["epoch"], fields["num_slots"]) == (9, 3)
    assert (fields["max_tokens"], fields["max_rows"], fields["max_blocks_per_row"]) == (37, 5, 11)
    assert fields["max_logits"] == 7
    assert (fields["max_samples"], fields["max_history"], fields["max_transfers"]) == (9, 41, 3)
    assert fields["total_bytes"] == HEADER_BYTES + 3 * fields["slot_bytes"]
    fields = dict(zip(RING_HEADER_FIELDS, RING_HEADER.unpack(LOGITS.header(9)), strict=True))
    assert (fields["kind"], fields["vocabulary_size"]) == (KIND_LOGITS, 101)
    assert (fields["max_rows"], fields["max_logits"]) == (0, 7)
    assert fields["total_bytes"] == LOGITS.total_bytes


def test_arrays_are_aligned_and_do_not_overlap() -> None:
    end = 0
    for offset, shape in STEP.arrays.values():
        assert offset % ALIGNMENT == 0
        assert offset >= end
        end = offset + 4 * shape[0] * (shape[1] if len(shape) == 2 else 1)
    assert end <= STEP.slot_bytes
    assert STEP.slot_offset(2) + STEP.slot_bytes == STEP.total_bytes
    assert LOGITS.slot_offset(2) + LOGITS.slot_bytes == LOGITS.total_bytes
    assert LOGITS.logits_offset % ALIGNMENT == LOGITS.slot_bytes % ALIGNMENT == 0


def test_a_slot_beyond_the_ring_is_a_bug() -> None:
    for layout in (STEP, LOGITS):
        with pytest.raises(AssertionError):
            layout.slot_offset(3)


@pytest.mark.parametrize(("compiler", "language"), [("g++", "c++"), ("gcc", "c")])
def test_the_generated_header_compiles_and_agrees(
    compiler: str, language: str, tmp_path: Path
) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} on this machine")
    subprocess.run([sys.executable, SCRIPT, tmp_path / "layout.h"], check=True)
    (tmp_path / "reader.src").write_text(READER)
    flags = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-x", language]
    subprocess.run(
        [compiler, *flags, "-o", tmp_path / "reader", tmp_path / "reader.src"], check=True
    )
    printed = subprocess.run(
        [tmp_path / "reader"], input=STEP.header(9), stdout=subprocess.PIPE, check=True
    )
    offsets = [offset for offset, _ in STEP.arrays.values()]
    expected = [9, 3, STEP.total_bytes, STEP.slot_offset(2), *offsets, LOGITS.logits_offset]
    assert [int(line) for line in printed.stdout.split()] == expected
