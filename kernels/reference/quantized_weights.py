"""Matrices of 4 or 8 bits as GPU kernels read them, and what they mean.

Codes are packed into int32 words so that a word's halves are two columns side by side, as a tensor
core wants them, and one mask picks a pair of codes. A block of 16 or 32 words of a row (64 or 128
bytes) holds as many parts as a half has codes: 4 of int4, 2 of 8 bits. In a block of W words, bits
[b * p, b * p + b) of half h of word w are column 2 W p + 2 w + h of the block. Rows are padded with
code 0 to whole blocks.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

Bits = Literal[4, 8]


@dataclass(frozen=True, slots=True)
class IntWeight:
    """weight [o, c] = scale * (code - zero), of output o and of the group that column c is in.

    `columns`: K, without padding. `group`: columns that share a scale (`group_supported`), 0 where
    all of a row do. `words` int32 [O, ...]: int4 codes are 0..15, int8 codes two's complement.
    `scales` [G, O] of any float dtype, of padding too. `zeros`: int8 (of int4) or int16 [G, O];
    None: 8 for int4, 0 for int8.
    """

    bits: Bits
    columns: int
    group: int
    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None

    @property
    def outputs(self) -> int:
        """O."""
        return int(self.words.shape[0])

    @property
    def block_words(self) -> int:
        """Words of a block."""
        return words_of_block(self.group)

    @property
    def num_bytes(self) -> int:
        """On a device."""
        tensors = (self.words, self.scales, self.zeros)
        return sum(each.numel() * each.element_size() for each in tensors if each is not None)

    def to(self, device: torch.device) -> "IntWeight":
        """The same on a device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(
            self, words=self.words.to(device), scales=self.scales.to(device), zeros=zeros
        )

    def values(self) -> torch.Tensor:
        """float32 [O, K]: exact for scales of 16 bits."""
        codes = unpacked(self.words, self.bits, self.block_words)
        if self.bits == 8:
            codes = codes - ((codes & 0x80) << 1)
        groups = torch.arange(self.columns, device=codes.device)
        groups = groups // self.group if self.group else groups * 0
        middle = 8 if self.bits == 4 else 0
        zeros = middle if self.zeros is None else self.zeros.to(torch.int32).T[:, groups]
        difference = codes[:, : self.columns] - zeros
        return self.scales.to(torch.float32).T[:, groups] * difference.to(torch.float32)


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """weight = scale * value, values of e4m3 (no infinities, largest 448), never NaN.

    `words` as of int8. `scales` float32 [G, O]: of groups of 128 columns, or of all (`group` 0).
    """

    columns: int
    group: int
    words: torch.Tensor
    scales: torch.Tensor

    @property
    def outputs(self) -> int:
        """O."""
        return int(self.words.shape[0])

    @property
    def block_words(self) -> int:
        """Words of a block."""
        return words_of_block(self.group)

    @property
    def num_bytes(self) -> int:
        """On a device."""
        return 4 * (self.words.numel() + self.scales.numel())

    def to(self, device: torch.device) -> "Float8Weight":
        """The same on a device."""
        return replace(self, words=self.words.to(device), scales=self.scales.to(device))

    def values(self) -> torch.Tensor:
        """float32 [O, K], rounded once."""
        codes = unpacked(self.words, 8, self.block_words)[:, : self.columns]
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
        groups = torch.arange(self.columns, device=codes.device)
        return values * self.scales.T[:, groups // self.group if self.group else groups * 0]


QuantizedWeight = IntWeight | Float8Weight
"""A matrix that `quantized_matmul` multiplies."""


def group_supported(bits: Bits, group: int) -> bool:
    """Whether kernels take groups of so many columns: 32, 64, 128, 256 and multiples of 256."""
    block = block_columns(bits, group)
    return group in (0, 32, 64, 128) or group % max(block, 256) == 0


def words_of_block(group: int) -> int:
    """Words of a block: as many as leave no group without a part of its own."""
    return 16 if group == 32 else 32


def block_columns(bits: Bits, group: int) -> int:
    """Columns of a block."""
    return words_of_block(group) * 32 // bits


def packed(codes: torch.Tensor, bits: Bits, block_words: int) -> torch.Tensor:
    """Codes 0.. [O, K] of any integer dtype -> int32 words [O, ...], padded with zeros."""
    rows, columns = codes.shape
    parts = 16 // bits
    blocks = -(-columns // (2 * parts * block_words))
    padded = codes.new_zeros((rows, blocks * 2 * parts * block_words))
    padded[:, :columns] = codes
    placed = padded.view(rows, blocks, parts, block_words, 2)
    words = torch.zeros((rows, blocks, block_words), dtype=torch.int32, device=codes.device)
    for part in range(parts):
        for half in range(2):
            words |= placed[:, :, part, :, half].to(torch.int32) << (bits * part + 16 * half)
    return words.view(rows, -1)


def unpacked(words: torch.Tensor, bits: Bits, block_words: int) -> torch.Tensor:
    """The codes of words, with padding: int32 [O, ...], 0..2^bits - 1."""
    parts = 16 // bits
    rows, count = words.shape
    shifts = [[bits * part + 16 * half for half in range(2)] for part in range(parts)]
    by = torch.tensor(shifts, dtype=torch.int32, device=words.device)
    spread = words.view(rows, count // block_words, 1, block_words, 1) >> by.view(1, 1, parts, 1, 2)
    return (spread & ((1 << bits) - 1)).reshape(rows, count * 2 * parts)
