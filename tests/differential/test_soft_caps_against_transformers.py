"""A Llama with Gemma 2's soft caps: every plan against transformers' own capped attention."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from step_driver import DrivenSequence, StepDriver
from tiny_models import reference_logits, save, tiny_model, write_gguf
from triptych.services.executor.backend import BackendOptions, open_backend
from triptych.services.runtime.model_files import resolve_model

SCORES, LOGITS = 0.6, 1.5


def capped_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **rest: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' Gemma 2 attention in place of Llama's."""
    out: tuple[torch.Tensor, torch.Tensor] = eager_attention_forward(
        module, query, key, value, attention_mask, softcap=SCORES, **rest
    )
    return out


AttentionInterface.register("capped", capped_forward)
AttentionMaskInterface.register("capped", eager_mask)


PLANS: dict[str, BackendOptions] = {
    "eager": BackendOptions(plan="eager"),
    "native": BackendOptions(plan="native"),
    "cudagraph": BackendOptions(plan="cudagraph", device="emulated", max_num_seqs=2),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_soft_caps(plan: str, form: str, tmp_path: Path) -> None:
    caps: dict[str, object] = {
        "attn_logit_softcapping": SCORES,
        "final_logit_softcapping": LOGITS,
    }
    model = tiny_model("llama", {**caps, "attn_implementation": "capped"})
    path = tmp_path / "model"
    if form == "folder":
        save(model, path)
    else:
        path = tmp_path / "model.gguf"
        write_gguf(model, path)
    tokens = np.random.default_rng().integers(0, 96, 70).tolist()
    plain = reference_logits(model, tokens)
    expected = LOGITS * np.tanh(plain / LOGITS)
    options = replace(PLANS[plan], kv_cache_dtype="float32", kv_cache_memory=1 << 21, threads=2)
    backend = open_backend(resolve_model(str(path)), options)
    assert backend.facts.plan == plan
    driver, sequence = StepDriver(backend), DrivenSequence()
    got = [driver.step([(sequence, tokens[:64])])[0]]
    got += [driver.step([(sequence, [token])])[0] for token in tokens[64:]]
    np.testing.assert_allclose(np.stack(got), expected[63:], atol=2e-4)
    # The caps matter here: without them the numbers are others.
    assert np.abs(plain[63:] - expected[63:]).max() > 0.1
    bare = tiny_model("llama", {"attn_implementation": "eager"})
    assert np.abs(reference_logits(bare, tokens)[63:] - plain[63:]).max() > 0.01
