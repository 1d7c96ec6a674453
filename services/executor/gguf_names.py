"""Names of transformers' state dicts -> tensors of a GGUF file, as llama.cpp's converter has them.

It also reorders the rows of q and k of `llama` files (rotation of neighbours instead of halves) and
transposes GPT-2's matrices.
"""

from dataclasses import dataclass
from typing import Literal

from triptych.services.executor.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class GgufPlace:
    """Name in the file, and what the converter did to the tensor.

    interleaved: rows of each of `heads` heads are reordered, pair (i, half + i) -> neighbours.
    """

    name: str
    change: Literal["none", "transposed", "interleaved"] = "none"
    heads: int = 0


_LLAMA = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GPT2 = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}


def gguf_place(parameter: str, config: ModelConfig) -> GgufPlace:
    """Where the parameter `name` of transformers' state dict is in a GGUF file."""
    stem, _, kind = parameter.rpartition(".")
    if stem in _OUTER:
        return GgufPlace(f"{_OUTER[stem]}.{kind}")
    gpt2 = config.family == "gpt2"
    prefix = "transformer.h." if gpt2 else "model.layers."
    layer, _, part = stem.removeprefix(prefix).partition(".")
    name = f"blk.{layer}.{(_GPT2 if gpt2 else _LLAMA)[part]}.{kind}"
    if gpt2:
        matrix = kind == "weight" and not part.startswith("ln_")
        return GgufPlace(name, "transposed" if matrix else "none")
    if config.architecture == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config.num_heads if part.endswith("q_proj") else config.num_kv_heads
        return GgufPlace(name, "interleaved", heads)
    return GgufPlace(name)
