"""SmolLM2 from its GGUF against transformers reading the same file: logits and greedy tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from step_driver import DrivenSequence, StepDriver
from triptych.services.executor.backend import BackendOptions, open_backend
from triptych.services.runtime.model_files import resolve_model

torch.set_num_threads(1)  # the suite shares its cores

pytestmark = pytest.mark.smollm

# "Gravity is", "The capital of France is", the chat template's opening: token ids of SmolLM2.
PROMPTS = ([20000, 314], [504, 3575, 282, 4649, 314], [1, 9690, 198, 2683, 359, 253])
NEW_TOKENS = 8


def transformers_model(path: Path) -> torch.nn.Module:
    """What `from_pretrained(gguf_file=...)` builds; that call also wants the accelerate package."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True, attn_implementation="eager",
    )  # fmt: skip
    with no_init_weights():
        model = LlamaForCausalLM(config)
    state = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"]
    assert not unexpected
    model.tie_weights()
    network: torch.nn.Module = model.eval()
    return network


def test_greedy_tokens_and_logits(smollm: Path) -> None:
    reference = transformers_model(smollm)
    options = BackendOptions(plan="eager", max_model_len=64, kv_cache_memory=16 << 20)
    driver = StepDriver(open_backend(resolve_model(str(smollm)), options))
    sequences = [DrivenSequence() for _ in PROMPTS]
    texts = [list(prompt) for prompt in PROMPTS]
    chunks = [list(prompt) for prompt in PROMPTS]
    ours = []
    for _ in range(NEW_TOKENS):
        logits = driver.step(list(zip(sequences, chunks, strict=True)))
        ours.append(logits)
        chunks = [[int(row.argmax())] for row in logits]
        for text, (token,) in zip(texts, chunks, strict=True):
            text.append(token)
    for row, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        with torch.inference_mode():
            theirs = reference(torch.tensor([text])).logits[0].numpy()
        for step in range(NEW_TOKENS):
            expected = theirs[len(prompt) - 1 + step]
            np.testing.assert_allclose(ours[step][row], expected, atol=2e-3)
            top, second = np.sort(expected)[[-1, -2]]
            if top - second > 1e-3:
                assert text[len(prompt) + step] == int(expected.argmax())
