"""The twins walk in lockstep; what they must do is checked after every call."""

from collections.abc import Callable, Sequence

import pytest

from batch_model import BatchFactory
from batch_twins import TWINS
from batch_walk import BatchWalk
from triptych.engine_core.block_tables import BlockTables
from triptych.engine_core.prefix_cache import PrefixCache
from triptych.engine_core.python_batch import PythonBatch


def _walk(seeds: range, factories: Sequence[BatchFactory]) -> None:
    for seed in seeds:
        BatchWalk(seed, factories).run(num_rounds=15)


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_random_walks(first: int) -> None:
    _walk(range(first, first + 100), TWINS)


FAULTS: dict[str, tuple[type, str, Callable[..., object]]] = {
    "a shared block is written": (BlockTables, "_holders", lambda tables, block: 1),
    "no copy is made": (BlockTables, "copies", lambda tables: []),
    "copies are made backwards": (
        BlockTables,
        "copies",
        lambda tables: [(s, t) for t, s in reversed(tables._copies.items())],
    ),
    "a block that was taken is still found": (PrefixCache, "forget", lambda cache, block: None),
    "a closed sequence in flight gives its blocks back": (
        PythonBatch,
        "close",
        lambda batch, sequence_id: batch._release(batch._open.leave(sequence_id)),
    ),
    "a token more is taken for computed": (
        PythonBatch,
        "_progress",
        lambda batch, sequence, num_tokens: batch._open.progress(sequence, num_tokens + 1),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_walks_notice_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        _walk(range(30), [PythonBatch])
