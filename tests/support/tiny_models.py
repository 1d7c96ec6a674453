"""Random tiny models of transformers, as folders and as GGUF twins of the same weights."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

Floats = npt.NDArray[np.float32]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}


def tiny_model(family: str, overrides: Mapping[str, object]) -> torch.nn.Module:
    """A model of "llama", "mistral", "qwen2" or "gpt2" with lively random weights, float32."""
    torch.manual_seed(7)
    if family == "gpt2":
        sizes: dict[str, object] = {
            "vocab_size": 96, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128,
            "attn_implementation": "eager",
        }  # fmt: skip
        model: torch.nn.Module = GPT2LMHeadModel(GPT2Config(**{**sizes, **overrides}))
    else:
        config, network = {
            "llama": (LlamaConfig, LlamaForCausalLM),
            "mistral": (MistralConfig, MistralForCausalLM),
            "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        }[family]
        model = network(config(**{**_SIZES, **overrides}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            norm = weight.dim() == 1 and name.endswith("weight")
            scale = weight.shape[-1] ** -0.5 if weight.dim() == 2 else 0.2
            weight.copy_(torch.randn_like(weight) * scale + (1.0 if norm else 0.0))
    return model.eval()


def save(model: torch.nn.Module, folder: Path, **options: object) -> None:
    """Write config.json and safetensors, as transformers does."""
    writer = getattr(model, "save_pretrained")  # noqa: B009 - transformers has no types
    writer(folder, **options)


def reference_logits(model: torch.nn.Module, tokens: list[int]) -> Floats:
    """transformers' logits [len(tokens), vocabulary]."""
    with torch.inference_mode():
        out = model(torch.tensor([tokens])).logits[0]
    logits: Floats = out.numpy()
    return logits


def write_gguf(
    model: torch.nn.Module,
    path: Path,
    rope_factors: Floats | None = None,
    type_of: Callable[[str], str] = lambda name: "F32",
) -> None:
    """Write a Llama, Qwen2 or GPT-2 as llama.cpp's converter does.

    `type_of` gives the type of a matrix by its GGUF name; vectors are float32. K-quants, for which
    there is no quantiser here, hold random blocks instead of the model's weights.
    """
    config = getattr(model, "config")  # noqa: B009 - transformers has no types
    kind = str(config.model_type)
    writer = GGUFWriter(str(path), kind)
    hf = config.to_dict()
    gpt2 = kind == "gpt2"
    heads = hf["n_head" if gpt2 else "num_attention_heads"]
    kv_heads = heads if gpt2 else hf["num_key_value_heads"]
    hidden = hf["n_embd" if gpt2 else "hidden_size"]
    writer.add_context_length(hf["n_positions" if gpt2 else "max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(4 * hidden if gpt2 else hf["intermediate_size"])
    writer.add_block_count(hf["n_layer" if gpt2 else "num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    if gpt2:
        writer.add_layer_norm_eps(hf["layer_norm_epsilon"])
    else:
        writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
        writer.add_rope_freq_base(hf["rope_parameters"]["rope_theta"])
        head_dim = hf.get("head_dim") or hidden // heads
        writer.add_rope_dimension_count(head_dim)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if hf.get("attn_logit_softcapping") is not None:
        writer.add_attn_logit_softcapping(hf["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(hf["final_logit_softcapping"])
    tied = bool(hf["tie_word_embeddings"])
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        values = weight.numpy()
        if kind == "llama" and ".q_proj." in name:
            values = interleaved(values, heads)
        if kind == "llama" and ".k_proj." in name:
            values = interleaved(values, kv_heads)
        if gpt2 and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            values = np.ascontiguousarray(values.T)
        stored = type_of(gguf_name(name)) if values.ndim == 2 else "F32"
        if stored == "F32":
            writer.add_tensor(gguf_name(name), values)
            continue
        raw = (random_blocks if stored in _K_BLOCKS else quantised)(stored, values)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=GGMLQuantizationType[stored])
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_K_BLOCKS = {"Q4_K": (144, 0, 2), "Q5_K": (176, 0, 2), "Q6_K": (210, 208, None)}
"""Bytes of a block of 256, and where its scale and the scale of its minima are, float16."""


def quantised(kind: str, values: Floats) -> npt.NDArray[np.uint8]:
    """Rows of blocks of a type that the gguf package can write."""
    raw: npt.NDArray[np.uint8] = quantize(values, GGMLQuantizationType[kind]).view(np.uint8)
    return raw


def random_blocks(kind: str, values: Floats) -> npt.NDArray[np.uint8]:
    """Rows of random K-quant blocks for a matrix of this shape, about as large as a model's."""
    shape = values.shape
    size, scale_at, min_at = _K_BLOCKS[kind]
    rng = np.random.default_rng(shape[0])
    blocks = rng.integers(0, 256, (shape[0], shape[1] // 256, size), dtype=np.uint8)
    scale = np.float16(1e-5 if kind == "Q6_K" else 2e-4)
    for at, value in ((scale_at, scale), (min_at, np.float16(scale * 7))):
        if at is not None:
            blocks[:, :, at : at + 2] = np.frombuffer(value.tobytes(), np.uint8)
    return blocks.reshape(shape[0], -1)


def interleaved(weight: Floats, heads: int) -> Floats:
    """The converter's reordering of q and k rows: halves of a head -> neighbours."""
    shape = weight.shape
    parts = weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
    return np.ascontiguousarray(parts.swapaxes(1, 2).reshape(shape))


_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm", "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """transformers' name -> GGUF's."""
    stem, _, kind = name.rpartition(".")
    for prefix in ("model.layers.", "transformer.h."):
        if stem.startswith(prefix):
            layer, _, part = stem.removeprefix(prefix).partition(".")
            return f"blk.{layer}.{_NAMES[part]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"
