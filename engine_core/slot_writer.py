"""Writes a planned step into a slot of the step ring, in the layout of layout.StepLayout."""

from array import array

from triptych.engine_core.layout import (
    DEVICE_HEADER,
    DEVICE_HEADER_OFFSET,
    PREVIOUS_SAMPLE,
    STEP_HEADER,
    StepLayout,
)
from triptych.engine_core.planned_step import PlannedStep


def write_slot(
    slot: memoryview,
    layout: StepLayout,
    step_id: int,
    step: PlannedStep,
    block_size: int,
) -> None:
    """Fill `slot`, at least layout.slot_bytes of writable bytes, with a step and its transfers.

    Entries beyond the step's extents keep what they had. Raises ValueError, with nothing written,
    when the step exceeds the layout.
    """
    _check(slot, layout, step)
    columns = {name: array("i") for name in layout.arrays}
    columns["row_starts"].append(0)
    for row in step.rows:
        table, start, end = row.sequence.table, row.start, row.end
        columns["token_ids"] += row.sequence.token_ids[start : start + row.num_tokens]
        columns["token_ids"] += row.drafts
        if row.previous >= 0:
            columns["token_ids"].append(PREVIOUS_SAMPLE - row.previous)
        columns["positions"].extend(range(start, end))
        columns["slots"].extend(
            table[t // block_size] * block_size + t % block_size for t in range(start, end)
        )
        columns["row_starts"].append(row.first_token + row.num_computed)
        columns["kv_lengths"].append(end)
        columns["logits_tokens"].extend(range(row.first_token, row.first_token + row.num_scored))
        last = row.first_token + row.num_tokens - 1
        columns["logits_tokens"].extend(range(last, last + row.num_samples))
        columns["block_tables"].extend(table)
        columns["block_tables"].extend([-1] * (layout.max_blocks_per_row - len(table)))
    for kind, pairs in (("copy", step.copies), ("store", step.stores), ("load", step.loads)):
        columns[f"{kind}_sources"].extend(source for source, _ in pairs)
        columns[f"{kind}_targets"].extend(target for _, target in pairs)
    STEP_HEADER.pack_into(
        slot, 0, step_id, step.num_tokens, len(step.rows), step.num_logits, len(step.copies)
    )
    transfers = len(step.stores), len(step.loads)
    DEVICE_HEADER.pack_into(slot, DEVICE_HEADER_OFFSET, *transfers, 0, 0, 0, 0)
    for name, (offset, _) in layout.arrays.items():
        column = columns[name]
        with slot[offset : offset + 4 * len(column)].cast("i") as target:
            target[:] = memoryview(column)


def _check(slot: memoryview, layout: StepLayout, step: PlannedStep) -> None:
    if slot.nbytes < layout.slot_bytes:
        raise ValueError(f"slot: {slot.nbytes} bytes, the layout has {layout.slot_bytes}")
    for name, count, most in (
        ("rows", len(step.rows), layout.max_rows),
        ("tokens", step.num_tokens, layout.max_tokens),
        ("logits", step.num_logits, layout.max_logits),
        ("copies", len(step.copies), layout.max_rows),
        ("stores", len(step.stores), layout.max_transfers),
        ("loads", len(step.loads), layout.max_transfers),
    ):
        if count > most:
            raise ValueError(f"{name}: {count}, the layout has {most}")
    for row in step.rows:
        held = len(row.sequence.table)
        if held > layout.max_blocks_per_row:
            raise ValueError(
                f"blocks: {held} of sequence {row.sequence.sequence_id}, the layout has"
                f" {layout.max_blocks_per_row}"
            )
