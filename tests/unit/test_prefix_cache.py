"""The plain prefix cache by itself: digests, registration, lookup."""

from hashlib import blake2b

import pytest

from triptych.engine_core import prefix_cache
from triptych.engine_core.ids import BlockId
from triptych.engine_core.prefix_cache import (
    MAX_CHILDREN_TRIED,
    Hit,
    PrefixCache,
    block_digest,
    chain_digests,
    root_digest,
)

ROOT = root_digest(b"")


def digests_of(tokens: list[int], root: bytes = ROOT) -> list[bytes]:
    return [root, *chain_digests(root, tokens, 2)]


def filled(*texts: list[int]) -> PrefixCache:
    """Blocks 0, 1, ... with the whole blocks of the texts."""
    cache, block = PrefixCache(2), 0
    for tokens in texts:
        digests = digests_of(tokens)
        for index in range(len(tokens) // 2):
            part = tokens[2 * index : 2 * index + 2]
            cache.register(BlockId(block), digests[index], digests[index + 1], part)
            block += 1
    cache.check()
    return cache


def test_digests_are_chained_blake2b_of_little_endian_tokens() -> None:
    root = blake2b(b"salt", digest_size=16).digest()
    assert root_digest(b"salt") == root
    first = blake2b(root + b"\x01\0\0\0\x02\x01\0\0", digest_size=16).digest()
    second = blake2b(first + b"\x03\0\0\0\xff\xff\xff\x7f", digest_size=16).digest()
    assert chain_digests(root, [1, 258, 3, 2**31 - 1, 5], 2) == [first, second]
    assert block_digest(root, [1, 258]) == first


def test_a_known_digest() -> None:
    """BLAKE2b-128 of nothing, as in the reference implementation's `b2sum -l 128`."""
    assert ROOT.hex() == "cae66941d9efbd404e4d88758ea67670"


def test_whole_blocks_as_far_as_they_are_found() -> None:
    cache = filled([1, 2, 3, 4, 5, 6])
    for tokens, blocks in (
        ([1, 2, 3, 4, 5, 6, 7], [0, 1, 2]),
        ([1, 2, 3, 4, 9, 9, 7], [0, 1]),
        ([3, 4, 1, 2, 5], []),
        ([1, 2, 9, 9, 5, 6, 7], [0]),
    ):
        assert cache.lookup(tokens, digests_of(tokens)) == Hit(
            [BlockId(b) for b in blocks], None, 0
        )


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4], ([0], 1, 1)),
        ([1, 2, 3], ([0], None, 0)),
        ([1, 2], ([], 0, 1)),
        ([1], ([], None, 0)),
        ([1, 2, 3, 9, 9], ([0], 1, 1)),
        ([1, 9, 9], ([], 0, 1)),
    ],
)
def test_the_last_token_is_never_found(
    tokens: list[int], expected: tuple[list[int], int | None, int]
) -> None:
    assert tuple(filled([1, 2, 3, 4]).lookup(tokens, digests_of(tokens))) == expected


def test_tokens_and_parents_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """With digests that all collide, nothing wrong is found."""
    monkeypatch.setattr(prefix_cache, "block_digest", lambda parent, token_ids: bytes(16))
    cache = filled([1, 2])
    assert cache.lookup([1, 2, 3], digests_of([1, 2, 3])).blocks == [0]
    assert cache.lookup([1, 3, 3], digests_of([1, 3, 3])).blocks == []
    other = root_digest(b"other")
    assert cache.lookup([1, 2, 3], digests_of([1, 2, 3], other)) == Hit([], None, 0)


def test_the_first_block_of_a_digest_stays() -> None:
    cache = filled([1, 2])
    cache.register(BlockId(5), ROOT, block_digest(ROOT, [1, 2]), [1, 2])
    assert (BlockId(5) in cache, len(cache)) == (False, 1)
    cache.forget(BlockId(5))
    assert cache.lookup([1, 2, 3], digests_of([1, 2, 3])).blocks == [0]
    cache.forget(BlockId(0))
    assert len(cache) == 0
    cache.check()


def test_the_longest_child_wins_then_the_lowest_block() -> None:
    cache = PrefixCache(4)
    digest = block_digest(ROOT, [1, 2, 3, 4])
    cache.register_partial(BlockId(7), ROOT, [1, 2])
    cache.register_partial(BlockId(3), ROOT, [1, 5])
    cache.register(BlockId(6), ROOT, digest, [1, 2, 3, 4])
    for tokens, expected in (
        ([1, 2, 3, 9, 9], (6, 3)),
        ([1, 2, 9, 9, 9], (6, 2)),
        ([1, 9, 9, 9, 9], (3, 1)),
        ([1, 5, 9, 9, 9], (3, 2)),
        ([9, 9, 9, 9, 9], (None, 0)),
    ):
        chain = [ROOT, block_digest(ROOT, tokens[:4])]
        assert cache.lookup(tokens, chain)[1:] == expected
    cache.forget(BlockId(6))
    assert cache.lookup([1, 2, 3, 4, 5], [ROOT, digest])[1:] == (7, 2)
    cache.check()


def test_only_the_latest_children_are_tried() -> None:
    cache = PrefixCache(4)
    for block in range(MAX_CHILDREN_TRIED + 1):
        cache.register_partial(BlockId(block), ROOT, [100 + block, 1])
    assert cache.lookup([100, 1, 1], [ROOT])[1:] == (None, 0)
    assert cache.lookup([101, 1, 1], [ROOT])[1:] == (1, 2)
    cache.register_partial(BlockId(90), ROOT, [100, 1])
    assert cache.lookup([100, 1, 1], [ROOT])[1:] == (90, 2)
    cache.check()


def test_a_part_that_is_there_already_is_not_registered_again() -> None:
    cache = PrefixCache(4)
    cache.register_partial(BlockId(0), ROOT, [1, 2, 3])
    cache.register_partial(BlockId(1), ROOT, [1, 2])
    cache.register_partial(BlockId(2), ROOT, [1, 2, 3])
    cache.register_partial(BlockId(3), ROOT, [1, 3])
    assert [BlockId(b) in cache for b in range(4)] == [True, False, False, True]


def test_forgetting_everything() -> None:
    cache = filled([1, 2, 3, 4])
    cache.clear()
    assert (len(cache), cache.lookup([1, 2, 3], digests_of([1, 2, 3]))) == (0, Hit([], None, 0))
    cache.check()


def test_check_notices_damage() -> None:
    cache = filled([1, 2])
    cache._index.clear()
    with pytest.raises(AssertionError, match="the index is not that of the whole blocks"):
        cache.check()
    cache = filled([1, 2])
    cache._children.clear()
    with pytest.raises(AssertionError, match="children are not those"):
        cache.check()
    with pytest.raises(AssertionError, match="block 0 is registered"):
        filled([1, 2]).register_partial(BlockId(0), ROOT, [7])
