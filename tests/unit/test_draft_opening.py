"""The served model and its draft model: what does not fit together, and who pays for the memory."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from tiny_models import save, tiny_model, write_gguf
from triptych.services.executor import kv_budget
from triptych.services.executor.backend import Backend, BackendOptions, load_model
from triptych.services.executor.draft_model import DraftModel
from triptych.services.executor.draft_opening import open_with_draft
from triptych.services.executor.stats import Counters, executor_stats
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import resolve_model

Plan = Literal["auto", "eager", "native"]
OPTIONS = BackendOptions(plan="auto", kv_cache_memory=1 << 20, threads=1)


def saved(folder: Path, name: str, family: str = "llama", **overrides: object) -> Path:
    save(tiny_model(family, overrides), folder / name)
    return folder / name


def opened(
    served: Path, draft: Path, options: BackendOptions = OPTIONS
) -> tuple[Backend, DraftModel]:
    return open_with_draft(
        resolve_model(str(served)), resolve_model(str(draft)), options, lambda done, total: None
    )


def block_bytes(path: Path, options: BackendOptions = OPTIONS) -> int:
    return load_model(resolve_model(str(path)), options).block_bytes


@pytest.mark.parametrize("plan", ["eager", "native"])
def test_one_budget_pays_for_the_blocks_of_both(plan: Plan, tmp_path: Path) -> None:
    served = saved(tmp_path, "served", num_hidden_layers=3)
    draft = saved(tmp_path, "draft", num_hidden_layers=1)
    options = replace(OPTIONS, plan=plan)
    each = block_bytes(served, options), block_bytes(draft, options)
    assert each[0] == 3 * each[1]
    for memory, blocks in ((7 * sum(each), 7), (7 * sum(each) - 1, 6)):
        backend, model = opened(served, draft, replace(options, kv_cache_memory=memory))
        assert backend.facts.num_blocks == model.facts.num_blocks == blocks
        assert backend.facts.kv_cache_bytes == blocks * each[0]
        assert model.facts.kv_cache_bytes == blocks * each[1]
    with pytest.raises(StartupError, match=f"takes {sum(each)} bytes"):
        opened(served, draft, replace(options, kv_cache_memory=sum(each) - 1))


def test_a_share_of_the_memory_is_of_what_both_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, draft = saved(tmp_path, "served"), saved(tmp_path, "draft", num_hidden_layers=1)
    size = block_bytes(served) + block_bytes(draft)
    monkeypatch.setattr(kv_budget, "available_memory", lambda: 30 * size)
    share = replace(OPTIONS, kv_cache_memory=None, memory_utilization=0.5)
    backend, model = opened(served, draft, share)
    assert backend.facts.num_blocks == model.facts.num_blocks == 15


def test_both_have_the_same_blocks_and_context(tmp_path: Path) -> None:
    served = saved(tmp_path, "served", max_position_embeddings=96)
    draft = saved(tmp_path, "draft", max_position_embeddings=128)
    backend, model = opened(served, draft, replace(OPTIONS, block_size=32))
    assert backend.facts.max_model_len == model.facts.max_model_len == 96
    assert backend.facts.block_size == model.facts.block_size == 32


def test_each_is_computed_by_the_plan_that_can(tmp_path: Path) -> None:
    served, draft = saved(tmp_path, "served"), saved(tmp_path, "draft", "gpt2")
    backend, model = opened(served, draft)
    assert (backend.facts.plan, model.facts.plan) == ("native", "eager")
    with pytest.raises(StartupError, match=r"^speculative_model: .*the native plan cannot"):
        opened(served, draft, replace(OPTIONS, plan="native"))


def test_other_vocabularies_are_refused(tmp_path: Path) -> None:
    served, draft = saved(tmp_path, "served"), saved(tmp_path, "draft", vocab_size=95)
    with pytest.raises(
        StartupError,
        match=r"^speculative_model: .*draft has a vocabulary of 95 tokens, .* one of 96",
    ):
        opened(served, draft)


def test_shorter_contexts_are_refused(tmp_path: Path) -> None:
    """Unless sequences are to be no longer."""
    served = saved(tmp_path, "served")
    draft = saved(tmp_path, "draft", max_position_embeddings=64)
    with pytest.raises(
        StartupError, match=r"^speculative_model: .*max_model_len 128 .*context of 64 tokens"
    ):
        opened(served, draft)
    backend, model = opened(served, draft, replace(OPTIONS, max_model_len=64))
    assert backend.facts.max_model_len == model.facts.max_model_len == 64


def test_what_is_wrong_with_a_draft_model_is_said_to_be_its_own(tmp_path: Path) -> None:
    served, draft = saved(tmp_path, "served"), saved(tmp_path, "draft")
    (draft / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(StartupError, match=r"^speculative_model: "):
        opened(served, draft)


def test_a_file_beside_a_folder_is_not_rounded(tmp_path: Path) -> None:
    served = saved(tmp_path, "served", hidden_size=192, intermediate_size=96)
    file = tmp_path / "draft.gguf"
    write_gguf(tiny_model("llama", {}), file)
    backend, model = opened(served, file, replace(OPTIONS, quantization="int8"))
    floats, _ = opened(served, file)
    assert backend.facts.weight_bytes < floats.facts.weight_bytes
    assert model.facts.weight_bytes > 4 * model.facts.parameters * 0.99


def test_stats_name_both(tmp_path: Path) -> None:
    served, draft = saved(tmp_path, "served"), saved(tmp_path, "draft", num_hidden_layers=1)
    backend, model = opened(served, draft)
    counters = Counters()
    counters.draft_done(3, 0.5)
    counters.draft_done(0, 0.25)
    stats = executor_stats(backend.facts, counters, model.facts)
    assert (stats.model, stats.draft_model, stats.draft_plan) == ("served", "draft", "native")
    assert (stats.draft_parameters, stats.draft_weight_bytes, stats.draft_kv_cache_bytes) == (
        model.facts.parameters, model.facts.weight_bytes, model.facts.kv_cache_bytes,
    )  # fmt: skip
    assert stats.draft_kv_cache_bytes * 2 == stats.kv_cache_bytes
    assert (stats.draft_tokens_total, stats.draft_seconds_total) == (3, 0.75)
    assert executor_stats(backend.facts, counters).draft_model == ""
