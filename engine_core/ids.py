"""Identifiers. Each is a plain int at run time and a type of its own for the checker."""

from typing import NewType

RequestId = NewType("RequestId", int)
"""One accepted request, unique in a scheduler's life (never reused)."""

SequenceId = NewType("SequenceId", int)
"""One sequence of tokens with its block table, unique in a scheduler's life (never reused)."""

BlockId = NewType("BlockId", int)
"""One block of KV cache, 0 <= id < num_blocks."""
