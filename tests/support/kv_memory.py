"""KV memory without numbers: each slot holds the text that its key and value were computed from.

Runs steps from slot bytes alone, as an executor does. Attention makes a token's key and value
depend on every token that its row attends to, so here they are that text: a wrong slot, a stale or
shared block, a copy that is missing, late or out of order leaves a text that is not the row's own,
in that step or a later one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from triptych.engine_core.layout import (
    DEVICE_HEADER,
    DEVICE_HEADER_OFFSET,
    STEP_HEADER,
    StepLayout,
)


class Text(NamedTuple):
    """`mark`: whose text it is (the salt)."""

    mark: str
    token_ids: tuple[int, ...] = ()

    def then(self, token_id: int) -> "Text":
        """The text with one token more."""
        return Text(self.mark, (*self.token_ids, token_id))


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """`logits`: the text that each logits row was computed from. `writers`: block -> row."""

    step_id: int
    row_texts: list[Text]
    logits: list[Text]
    writers: dict[int, int]


class KvMemory:
    """The blocks of the device and of host memory, empty at first."""

    def __init__(
        self, num_blocks: int, block_size: int, layout: StepLayout, num_host_blocks: int = 0
    ) -> None:
        self.block_size = block_size
        self._layout = layout
        self._texts: list[Text | None] = [None] * (num_blocks * block_size)
        self._host: list[list[Text | None]] = [[] for _ in range(num_host_blocks)]
        self.num_stores = self.num_loads = 0

    def run(self, slot: memoryview, marks: Sequence[str]) -> ExecutedStep:
        """Copy, store, attend. `marks`: one for each row, with which its first token's text begins.

        AssertionError where the step reads what was never written or belongs to another text, or
        where two rows write to one block or one reads what another writes.
        """
        step_id, num_tokens, num_rows, num_logits, num_copies = STEP_HEADER.unpack_from(slot)
        columns = {name: self._column(slot, name) for name in self._layout.arrays}
        self._transfer(slot, columns)
        sources, targets = columns["copy_sources"], columns["copy_targets"]
        for source, target in zip(sources[:num_copies], targets[:num_copies], strict=True):
            self._copy(source, target)
        starts = columns["row_starts"][: num_rows + 1]
        assert starts[0] == 0
        assert starts[-1] == num_tokens
        assert len(marks) == num_rows
        token_texts: list[Text] = []
        writers: dict[int, int] = {}
        for row in range(num_rows):
            token_texts += self._texts_of(columns, row, starts[row], starts[row + 1], marks[row])
            for kv_slot in columns["slots"][starts[row] : starts[row + 1]]:
                writer = writers.setdefault(kv_slot // self.block_size, row)
                assert writer == row, f"rows {writer} and {row} write to one block"
        self._check_readers(columns, num_rows, writers)
        kv_slots = columns["slots"][:num_tokens]
        assert len(set(kv_slots)) == num_tokens, "no two tokens have one slot"
        for kv_slot, text in zip(kv_slots, token_texts, strict=True):
            self._texts[kv_slot] = text
        logits_tokens = columns["logits_tokens"][:num_logits]
        assert logits_tokens == sorted(set(logits_tokens)), "logits rows are in token order"
        return ExecutedStep(
            step_id,
            [token_texts[end - 1] for end in starts[1:]],
            [token_texts[token] for token in logits_tokens],
            writers,
        )

    def _transfer(self, slot: memoryview, columns: dict[str, list[int]]) -> None:
        """Stores, then loads."""
        stores, loads, *_ = DEVICE_HEADER.unpack_from(slot, DEVICE_HEADER_OFFSET)
        size = self.block_size
        assert len(set(columns["store_targets"][:stores])) == stores, "two stores to one block"
        assert len(set(columns["load_targets"][:loads])) == loads, "two loads to one block"
        for source, target in zip(
            columns["store_sources"][:stores], columns["store_targets"][:stores], strict=True
        ):
            self._host[target] = self._texts[source * size : (source + 1) * size]
        for source, target in zip(
            columns["load_sources"][:loads], columns["load_targets"][:loads], strict=True
        ):
            assert len(self._host[source]) == size, "a block is loaded that nothing was stored to"
            self._texts[target * size : (target + 1) * size] = self._host[source]
        self.num_stores += stores
        self.num_loads += loads

    def spoil(self, slot: memoryview, broken: Sequence[bool]) -> None:
        """What the rows in `broken` wrote is NaN: it is no text that anybody may read."""
        starts, kv_slots = self._column(slot, "row_starts"), self._column(slot, "slots")
        for row, is_broken in enumerate(broken):
            for kv_slot in kv_slots[starts[row] : starts[row + 1]] if is_broken else ():
                self._texts[kv_slot] = Text("NaN", (0,))

    def table_texts(self, table: Sequence[int], num_tokens: int) -> list[Text | None]:
        """What the first `num_tokens` slots of a table hold."""
        return [self._texts[self._slot(table, position)] for position in range(num_tokens)]

    def _copy(self, source: int, target: int) -> None:
        assert source != target, "a block is copied to itself"
        size = self.block_size
        copied = self._texts[source * size : (source + 1) * size]
        self._texts[target * size : (target + 1) * size] = copied

    def _texts_of(
        self, columns: dict[str, list[int]], row: int, begin: int, end: int, mark: str
    ) -> list[Text]:
        """The texts of a row's tokens, given what its table holds before them."""
        table, length = self._table(columns, row), columns["kv_lengths"][row]
        first = length - (end - begin)
        assert begin < end, "a row has a token"
        assert first >= 0
        assert columns["positions"][begin:end] == list(range(first, length))
        text = Text(mark)
        for position, held in enumerate(self.table_texts(table, first)):
            assert held is not None, f"row {row} reads position {position}, never written"
            assert text.then(held.token_ids[-1]) == held, f"row {row} reads {held} after {text}"
            text = held
        texts = []
        for token in range(begin, end):
            position = first + token - begin
            assert columns["slots"][token] == self._slot(table, position), "slots follow the table"
            text = text.then(columns["token_ids"][token])
            texts.append(text)
        return texts

    def _check_readers(
        self, columns: dict[str, list[int]], num_rows: int, writers: dict[int, int]
    ) -> None:
        for row in range(num_rows):
            for block in self._table(columns, row):
                assert writers.get(block, row) == row, f"row {row} has a block that another writes"

    def _slot(self, table: Sequence[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _table(self, columns: dict[str, list[int]], row: int) -> list[int]:
        width = self._layout.max_blocks_per_row
        table = columns["block_tables"][row * width : (row + 1) * width]
        held = table.index(-1) if -1 in table else width
        assert all(block == -1 for block in table[held:]), "nothing but -1 behind the last block"
        assert len(set(table[:held])) == held, "a table names a block once"
        return table[:held]

    def _column(self, slot: memoryview, name: str) -> list[int]:
        offset, shape = self._layout.arrays[name]
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        return slot[offset : offset + 4 * count].cast("i").tolist()
