"""The shared-memory layout of the step ring and the logits ring, defined once.

`scripts/layout_header.py` writes a C header from this module. Both rings start with one header
page; slots follow. Every array starts on a 64-byte border. All numbers are little-endian.

    step ring   (written by the scheduler, read by the executor)
    logits ring (written by the executor, read by the scheduler)
"""

import struct
from dataclasses import dataclass
from functools import cached_property

LAYOUT_VERSION = 4
MAGIC = 0x4843_5954_5049_5254  # "TRIPTYCH" as little-endian bytes
HEADER_BYTES = 4096
ALIGNMENT = 64
KIND_STEP = 1
KIND_LOGITS = 2

RING_HEADER = struct.Struct("<QIIQIIIIIIIIIIQQ")
RING_HEADER_FIELDS = (
    "magic",  # u64
    "layout_version",  # u32
    "kind",  # u32, KIND_STEP or KIND_LOGITS
    "epoch",  # u64, of the scheduler
    "num_slots",  # u32
    "max_tokens",  # u32 (step ring), 0 otherwise
    "max_rows",  # u32 (step ring), 0 otherwise
    "max_blocks_per_row",  # u32 (step ring), 0 otherwise
    "vocabulary_size",  # u32 (logits ring), 0 otherwise
    "max_logits",  # u32, rows of logits
    "max_samples",  # u32 (step ring), 0 otherwise, and where the scheduler draws every token
    "max_history",  # u32 (step ring), 0 as above
    "max_transfers",  # u32 (step ring), 0 where no block is kept in host memory
    "reserved",  # u32
    "slot_bytes",  # u64
    "total_bytes",  # u64
)

STEP_HEADER = struct.Struct("<QIIII")
STEP_HEADER_FIELDS = (
    "step_id",  # u64: the generation of the slot's contents
    "num_tokens",  # u32
    "num_rows",  # u32
    "num_logits",  # u32
    "num_copies",  # u32
)
# Behind it: what only an executor reads that draws tokens, or keeps blocks in host memory.
DEVICE_HEADER = struct.Struct("<IIIIII")
DEVICE_HEADER_OFFSET = STEP_HEADER.size
DEVICE_HEADER_FIELDS = (
    "num_stores",  # u32
    "num_loads",  # u32
    "num_samples",  # u32: all of the step, or 0 where the scheduler draws them
    "num_history",  # u32
    "num_host_logits",  # u32
    "vocabulary_size",  # u32, of the samples: ids at or above are never drawn, nor counted
)
LOGITS_HEADER = struct.Struct("<QII")
LOGITS_HEADER_FIELDS = ("step_id", "num_rows", "reserved")  # u64, u32, u32

MAX_SAMPLE_LOGPROBS = 20
"""Samples that ask for more most likely tokens are drawn by the scheduler."""
PREVIOUS_SAMPLE = -2
"""As a token id, PREVIOUS_SAMPLE - i: the token that was drawn for sample i of the step before."""

SAMPLE_COLUMNS = (
    "temperature",  # float32 bits; 0 is greedy
    "top_p",  # float32 bits; 1 is off
    "min_p",  # float32 bits; 0 is off
    "repetition_penalty",  # float32 bits; 1 is off
    "presence_penalty",  # float32 bits; 0 is off
    "frequency_penalty",  # float32 bits; 0 is off
    "top_k",  # int32; 0 or -1 is off
    "seed_low",  # the seed's lower 32 bits
    "seed_high",  # its upper ones
    "choice",  # index of the choice within its request
    "position",  # of the token among the choice's output tokens
    "logprobs",  # most likely tokens to report beside the drawn one; -1 for no logprobs at all
)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class StepLayout:
    """A slot of the step ring: a STEP_HEADER, then int32 arrays.

    token_ids   [max_tokens]          the tokens to compute, rows one after another; -1: a token
                                      behind a row's own, for the executor's draft model to guess;
                                      PREVIOUS_SAMPLE - i: what sample i of the step before drew
    positions   [max_tokens]          position of each in its sequence
    slots       [max_tokens]          where its key and value go: block * block_size + offset
    row_starts  [max_rows + 1]        row r owns tokens [row_starts[r], row_starts[r + 1])
    kv_lengths  [max_rows]            tokens of the row's sequence after this step, these included
    logits_tokens [max_logits]        row i of the logits slot is for token logits_tokens[i]
    copy_sources [max_rows]           blocks to be copied, one after another, before all else:
    copy_targets [max_rows]           copy_sources[i] to copy_targets[i]
    block_tables [max_rows, max_blocks_per_row]   -1 behind the last block

    For an executor that keeps blocks in host memory; before the copies, and first the stores:

    store_sources, store_targets [max_transfers]  block of the device -> block of host memory
    load_sources, load_targets   [max_transfers]  block of host memory -> block of the device

    For an executor that draws tokens (num_samples is 0, or that of all the step's samples):

    sample_rows [max_samples]         the row of logits that a sample draws from; -1: the scheduler
                                      draws this one
    sample_params [max_samples, len(SAMPLE_COLUMNS)]
    history_starts [max_samples + 1]  tokens [history_starts[s], history_starts[s + 1]) of history
                                      are prompt and output of a sample with penalties
    history_prompts [max_samples]     how many of them, from the first on, are the prompt's
    history     [max_history]         ids; PREVIOUS_SAMPLE - i as in token_ids
    host_logits [max_logits]          the rows of logits that must come to the logits ring
    """

    num_slots: int
    max_tokens: int
    max_rows: int
    max_blocks_per_row: int
    max_logits: int
    max_samples: int = 0
    max_history: int = 0
    max_transfers: int = 0

    @cached_property
    def arrays(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Name -> (byte offset within the slot, shape); the dtype is int32."""
        shapes: dict[str, tuple[int, ...]] = {
            "token_ids": (self.max_tokens,),
            "positions": (self.max_tokens,),
            "slots": (self.max_tokens,),
            "row_starts": (self.max_rows + 1,),
            "kv_lengths": (self.max_rows,),
            "logits_tokens": (self.max_logits,),
            "copy_sources": (self.max_rows,),
            "copy_targets": (self.max_rows,),
            "block_tables": (self.max_rows, self.max_blocks_per_row),
            "store_sources": (self.max_transfers,),
            "store_targets": (self.max_transfers,),
            "load_sources": (self.max_transfers,),
            "load_targets": (self.max_transfers,),
            "sample_rows": (self.max_samples,),
            "sample_params": (self.max_samples, len(SAMPLE_COLUMNS)),
            "history_starts": (self.max_samples + 1,),
            "history_prompts": (self.max_samples,),
            "history": (self.max_history,),
            "host_logits": (self.max_logits,),
        }
        offset, out = _aligned(STEP_HEADER.size + DEVICE_HEADER.size), {}
        for name, shape in shapes.items():
            out[name] = (offset, shape)
            count = 1
            for extent in shape:
                count *= extent
            offset += _aligned(4 * count)
        return out

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        offset, (count,) = self.arrays["host_logits"]
        return offset + _aligned(4 * count)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole ring."""
        return HEADER_BYTES + self.num_slots * self.slot_bytes

    def slot_offset(self, slot: int) -> int:
        """Byte offset of a slot from the start of the ring."""
        assert 0 <= slot < self.num_slots
        return HEADER_BYTES + slot * self.slot_bytes

    def header(self, epoch: int) -> bytes:
        """The packed RING_HEADER."""
        return RING_HEADER.pack(
            MAGIC, LAYOUT_VERSION, KIND_STEP, epoch, self.num_slots, self.max_tokens,
            self.max_rows, self.max_blocks_per_row, 0, self.max_logits, self.max_samples,
            self.max_history, self.max_transfers, 0, self.slot_bytes, self.total_bytes,
        )  # fmt: skip


@dataclass(frozen=True)
class LogitsLayout:
    """A slot of the logits ring: a LOGITS_HEADER, then float32 [max_logits, vocabulary_size]."""

    num_slots: int
    max_logits: int
    vocabulary_size: int

    @property
    def logits_offset(self) -> int:
        """Byte offset of the logits within a slot."""
        return _aligned(LOGITS_HEADER.size)

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        return self.logits_offset + _aligned(4 * self.max_logits * self.vocabulary_size)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole ring."""
        return HEADER_BYTES + self.num_slots * self.slot_bytes

    def slot_offset(self, slot: int) -> int:
        """Byte offset of a slot from the start of the ring."""
        assert 0 <= slot < self.num_slots
        return HEADER_BYTES + slot * self.slot_bytes

    def header(self, epoch: int) -> bytes:
        """The packed RING_HEADER."""
        return RING_HEADER.pack(
            MAGIC, LAYOUT_VERSION, KIND_LOGITS, epoch, self.num_slots, 0,
            0, 0, self.vocabulary_size, self.max_logits, 0, 0, 0, 0, self.slot_bytes,
            self.total_bytes,
        )  # fmt: skip
