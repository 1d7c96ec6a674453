"""Which blocks hold which text: computed blocks are found again by what they and their past hold.

A text is its blocks, chained: a digest stands for a block's tokens and all that came before them
under one salt (`root_digest`). Knows nothing of who holds a block (block_tables.py).
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

from triptych.engine_core.ids import BlockId

DIGEST_BYTES = 16
MAX_CHILDREN_TRIED = 32
"""So many blocks with one parent are compared in a lookup, at most: it stays O(text)."""


def root_digest(salt: bytes) -> bytes:
    """The parent of a text's first block."""
    return blake2b(salt, digest_size=DIGEST_BYTES).digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The digest of a block whose predecessor has digest `parent`."""
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()


def chain_digests(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The digests of the whole blocks of `token_ids`, the first of which follows `parent`."""
    digests = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = block_digest(parent, token_ids[end - block_size : end])
        digests.append(parent)
    return digests


def split_digests(digests: bytes, num_tokens: int, block_size: int) -> list[bytes]:
    """The root and the digests of the whole blocks of `num_tokens` tokens. ValueError unless these
    are as many."""
    wanted = DIGEST_BYTES * (1 + num_tokens // block_size)
    if num_tokens < 1 or len(digests) != wanted:
        raise ValueError(
            f"digests: {len(digests)} bytes, {wanted} are those of {num_tokens} tokens"
        )
    return [digests[at : at + DIGEST_BYTES] for at in range(0, wanted, DIGEST_BYTES)]


class CachedBlock(NamedTuple):
    """What a block that can be found holds. `digest` is None for one that is filled in part."""

    parent: bytes
    digest: bytes | None
    token_ids: tuple[int, ...]


def whole_block(
    token_ids: Sequence[int], digests: Sequence[bytes], index: int, block_size: int
) -> CachedBlock:
    """The `index`-th whole block of a text; `digests`: its root and those of its whole blocks."""
    start = index * block_size
    tokens = tuple(token_ids[start : start + block_size])
    return CachedBlock(digests[index], digests[index + 1], tokens)


class Hit(NamedTuple):
    """The cached beginning of a text: whole blocks, in order, then `num_copied` tokens that are the
    first of block `source`; None and 0 where there is no such block."""

    blocks: list[BlockId]
    source: BlockId | None
    num_copied: int


class PrefixCache:
    """Blocks by digest, and by parent.

    `_index` has the whole blocks, one a digest: the first that was registered. `_children` has
    those and the partial ones by the digest of their parent, in order of registration.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[BlockId, CachedBlock] = {}
        self._index: dict[bytes, BlockId] = {}
        self._children: dict[bytes, dict[BlockId, None]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._blocks

    def lookup(self, token_ids: Sequence[int], digests: Sequence[bytes]) -> Hit:
        """The longest cached beginning that leaves at least the last token to be computed.

        `digests`: the root, then one for each whole block of `token_ids`. Whole blocks as far as
        they are found, their tokens and parents compared; then, of the first `MAX_CHILDREN_TRIED`
        children (latest first) of the last one, the one that shares most tokens with what follows;
        among equals the block with the lowest number.
        """
        size, most = self._block_size, len(token_ids) - 1
        blocks: list[BlockId] = []
        for index in range(most // size):
            block = self.find(whole_block(token_ids, digests, index, size))
            if block is None:
                break
            blocks.append(block)
        start = len(blocks) * size
        rest = tuple(token_ids[start : min(start + size, most)])
        source, num_copied = self.best_child(digests[len(blocks)], rest)
        return Hit(blocks, source, num_copied)

    def find(self, text: CachedBlock) -> BlockId | None:
        """The block that holds this text, which is a whole block's."""
        assert text.digest is not None, "prefix cache: a part of a block has no digest"
        block = self._index.get(text.digest)
        return block if block is not None and self._blocks[block] == text else None

    def text(self, block: BlockId) -> CachedBlock | None:
        """What a block that can be found holds."""
        return self._blocks.get(block)

    def best_child(self, parent: bytes, rest: tuple[int, ...]) -> tuple[BlockId | None, int]:
        """The child of `parent` that shares most with `rest`, and how many tokens."""
        best: BlockId | None = None
        longest = 0
        for block in self._latest_children(parent):
            shared = _common_length(self._blocks[block].token_ids, rest)
            if shared > longest or (shared == longest and best is not None and block < best):
                best, longest = block, shared
        return best, longest

    def _latest_children(self, parent: bytes) -> list[BlockId]:
        children = self._children.get(parent, {})
        return list(islice(reversed(children), MAX_CHILDREN_TRIED))

    def register(
        self, block: BlockId, parent: bytes, digest: bytes, token_ids: Sequence[int]
    ) -> None:
        """A whole block can be found from now on, unless another one has its digest."""
        if digest not in self._index:
            self._index[digest] = block
            self._add(block, CachedBlock(parent, digest, tuple(token_ids)))

    def register_partial(self, block: BlockId, parent: bytes, token_ids: Sequence[int]) -> None:
        """A block's first tokens can be found from now on, unless one of the children that a lookup
        would try begins with them."""
        count, tokens = len(token_ids), tuple(token_ids)
        for child in self._latest_children(parent):
            if self._blocks[child].token_ids[:count] == tokens:
                return
        self._add(block, CachedBlock(parent, None, tokens))

    def _add(self, block: BlockId, cached: CachedBlock) -> None:
        assert block not in self._blocks, f"prefix cache: block {block} is registered"
        self._blocks[block] = cached
        self._children.setdefault(cached.parent, {})[block] = None

    def forget(self, block: BlockId) -> None:
        """The block cannot be found any more; nothing if it could not be."""
        cached = self._blocks.pop(block, None)
        if cached is None:
            return
        if cached.digest is not None:
            del self._index[cached.digest]
        siblings = self._children[cached.parent]
        del siblings[block]
        if not siblings:
            del self._children[cached.parent]

    def clear(self) -> None:
        """Forget all."""
        self._blocks.clear()
        self._index.clear()
        self._children.clear()

    def check(self) -> None:
        """Assert that index and children name the registered blocks, each once. O(blocks)."""
        whole = {c.digest: block for block, c in self._blocks.items() if c.digest is not None}
        assert self._index == whole, "prefix cache: the index is not that of the whole blocks"
        children: dict[bytes, set[BlockId]] = {}
        for block, cached in self._blocks.items():
            children.setdefault(cached.parent, set()).add(block)
            size = len(cached.token_ids)
            if cached.digest is None:
                assert 1 <= size < self._block_size, f"prefix cache: partial {block} has {size}"
            else:
                assert size == self._block_size, f"prefix cache: whole {block} has {size}"
                digest = block_digest(cached.parent, cached.token_ids)
                assert digest == cached.digest, f"prefix cache: {block} has another's digest"
        named = {parent: set(blocks) for parent, blocks in self._children.items()}
        assert named == children, "prefix cache: children are not those of the registered blocks"


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        length += 1
    return length
