"""The rings that an executor is welcomed to, by what its hello says."""

import pytest

from triptych.services.scheduler.welcome import welcome_to
from triptych.services.transport.ring_layouts import logits_layout, step_layout
from triptych.v1 import stage_pb2

BASE = stage_pb2.ExecutorWelcome(
    epoch=7, num_slots=2, max_num_batched_tokens=512, max_num_seqs=64, max_logits=96
)


def hello(
    *, draws_tokens: bool = False, max_model_len: int = 4096, num_host_blocks: int = 0
) -> stage_pb2.ExecutorHello:
    facts = stage_pb2.ModelFacts(
        vocabulary_size=32_000, max_model_len=max_model_len, block_size=16, num_blocks=100,
        num_host_blocks=num_host_blocks,
    )  # fmt: skip
    return stage_pb2.ExecutorHello(model=facts, draws_tokens=draws_tokens)


def test_without_a_device_nothing_is_added() -> None:
    assert welcome_to(BASE, hello()) == BASE
    layout = step_layout(hello().model, BASE)
    assert layout.arrays["sample_rows"][1] == layout.arrays["history"][1] == (0,)
    assert layout.arrays["store_sources"][1] == (0,)


@pytest.mark.parametrize(
    ("max_model_len", "max_num_seqs", "history"),
    [(4096, 8, 1 << 16), (100_000, 8, 200_000), (4096, 256, 1 << 18), (1 << 22, 8, 1 << 20)],
)
def test_one_that_draws_tokens(max_model_len: int, max_num_seqs: int, history: int) -> None:
    base = stage_pb2.ExecutorWelcome(max_num_seqs=max_num_seqs, max_logits=max_num_seqs + 32)
    welcome = welcome_to(base, hello(draws_tokens=True, max_model_len=max_model_len))
    assert (welcome.max_samples, welcome.max_history) == (max_num_seqs + 32, history)
    assert welcome.max_transfers == 0
    assert base.max_samples == 0, "the next one may be another"


def test_the_logits_ring_is_the_same() -> None:
    device = hello(draws_tokens=True)
    assert logits_layout(device.model, welcome_to(BASE, device)) == logits_layout(
        device.model, BASE
    )


@pytest.mark.parametrize(("blocks", "transfers"), [(5, 5), (100_000, 256)])
def test_one_with_blocks_in_host_memory(blocks: int, transfers: int) -> None:
    welcome = welcome_to(BASE, hello(num_host_blocks=blocks))
    assert (welcome.max_samples, welcome.max_transfers) == (0, transfers)
