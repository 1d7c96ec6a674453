"""KvStorage: sizes, budget, stores, clearing."""

from dataclasses import replace

import pytest
import torch

from triptych.services.executor import kv_budget
from triptych.services.executor.kv_budget import KvBudget, available_memory, num_blocks_for
from triptych.services.executor.kv_storage import KvStorage, block_bytes
from triptych.services.executor.model_config import ModelConfig, Rope
from triptych.services.runtime.lifecycle import StartupError

CONFIG = ModelConfig(
    source="test", architecture="t", family="llama", vocabulary_size=8, hidden_size=8,
    intermediate_size=8, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8,
    max_position=64, norm_epsilon=1e-5, activation="silu", tied_head=True, rope=Rope(1e4),
)  # fmt: skip
SIZE = 2 * 3 * 16 * 2 * 8 * 4


def blocks(budget: KvBudget, config: ModelConfig = CONFIG, max_model_len: int = 64) -> int:
    size = block_bytes(config, 16, torch.float32)
    return num_blocks_for(size, 16, max_model_len, budget)


def test_block_bytes() -> None:
    assert block_bytes(CONFIG, 16, torch.float32) == SIZE
    assert block_bytes(CONFIG, 16, torch.bfloat16) == SIZE // 2


def test_exact_bytes_win() -> None:
    assert blocks(KvBudget(SIZE * 5 + 1, 0.9)) == 5
    assert blocks(KvBudget(SIZE)) == 1


def test_less_than_a_block_is_refused() -> None:
    with pytest.raises(StartupError, match=rf"kv_cache_memory {SIZE - 1} .*takes {SIZE} bytes"):
        blocks(KvBudget(SIZE - 1))


def test_a_share_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_budget, "available_memory", lambda: SIZE * 100)
    assert blocks(KvBudget(memory_utilization=0.25)) == 25
    assert blocks(KvBudget()) == 50
    with pytest.raises(StartupError, match="less than one block"):
        blocks(KvBudget(memory_utilization=0.001))


def test_the_default_leaves_the_machine_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_budget, "available_memory", lambda: 1 << 44)
    assert blocks(KvBudget()) == 64 * 4  # 64 sequences of 64 tokens
    big = replace(CONFIG, num_layers=100, num_heads=64, num_kv_heads=64, head_dim=128)
    size = block_bytes(big, 16, torch.float32)
    assert blocks(KvBudget(), big, 8192) == (1 << 30) // size
    assert blocks(KvBudget(memory_utilization=1.0), big, 8192) == 64 * 512


def test_available_memory_is_plausible() -> None:
    assert 1 << 20 < available_memory() < 1 << 50


def test_an_impossible_cache_is_one_line() -> None:
    with pytest.raises(StartupError, match="--kv-cache-memory"):
        KvStorage(CONFIG, 1 << 50, 16, torch.float32)


def test_store_and_clear() -> None:
    storage = KvStorage(CONFIG, 4, 16, torch.float32)
    assert storage.num_bytes == 4 * SIZE
    k = torch.arange(2 * 2 * 8, dtype=torch.float32).view(2, 2, 8) + 1
    storage.store(1, torch.tensor([17, 50]), k, -k)
    keys, values = storage.layer(1)
    assert keys.shape == values.shape == (4, 16, 2, 8)
    assert torch.equal(keys[1, 1], k[0])
    assert torch.equal(values[3, 2], -k[1])
    assert int(keys.count_nonzero()) == k.numel()
    assert not storage.layer(0)[0].any()
    storage.clear(torch.tensor([1]))
    assert not keys[1].any()
    assert keys[3].any()
