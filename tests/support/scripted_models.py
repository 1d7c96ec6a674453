"""Small model folders, made in milliseconds, whose outputs a test can write down beforehand.

    T1  byte tokenizer: token id = byte value, then special tokens, then plain pieces of text
    T2  SentencePiece-style tokenizer: word-start marker, prefix blank, byte fallback, a few words
    S1  Llama whose next-token distribution is any table [last token, next token]
    S2  GPT-2 whose next token depends on the position only: a script
    M2  random two-layer Llama, for everything where attention and KV cache matter

Each writer fills a folder in the Hugging Face layout: config.json, model.safetensors,
tokenizer.json, tokenizer_config.json, generation_config.json. A model writer adds the T1 tokenizer
where the folder has no tokenizer yet, so write another tokenizer first. Weights are float32.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from scripted_tokenizers import (
    CHATML_TEMPLATE,
    T1_BOS,
    T1_EOS,
    T1_FIRST_PIECE,
    T1_IM_END,
    T1_IM_START,
    T1_UNK,
    T1_VOCABULARY,
    T2_BOS,
    T2_EOS,
    T2_FIRST_BYTE,
    T2_UNK,
    T2_VOCABULARY,
    write_json,
    write_t1_tokenizer,
    write_t2_tokenizer,
)

__all__ = [
    "CHATML_TEMPLATE",
    "LOGIT_OF_ZERO",
    "T1_BOS",
    "T1_EOS",
    "T1_FIRST_PIECE",
    "T1_IM_END",
    "T1_IM_START",
    "T1_UNK",
    "T1_VOCABULARY",
    "T2_BOS",
    "T2_EOS",
    "T2_FIRST_BYTE",
    "T2_UNK",
    "T2_VOCABULARY",
    "write_m2_random_llama",
    "write_s1_markov",
    "write_s2_positions",
    "write_t1_tokenizer",
    "write_t2_tokenizer",
]

Floats = npt.NDArray[np.float32]

LOGIT_OF_ZERO = -1e4
"""The finite logit that stands for probability zero in S1: exp(-1e4) is 0 in every float type."""


def write_s1_markov(
    folder: Path,
    table: npt.NDArray[np.floating],
    *,
    eos_token_id: int | Sequence[int] | None = T1_EOS,
    max_position_embeddings: int = 2048,
) -> None:
    """Writes S1: a Llama with P(next | last) = table[last, next], whatever stands before `last`.

    `table` is [V, V], its rows are probabilities that sum to 1; V is a multiple of 64. Logits are
    log p, exactly to float32 rounding; probability 0 becomes LOGIT_OF_ZERO. Attention and MLP run
    but add nothing: their output projections are zero. The embedding is 100 x identity, the final
    norm makes sqrt(V) x unit vector of it, and the head divides by sqrt(V).
    """
    size = table.shape[0]
    if table.shape != (size, size) or size % 64:
        raise ValueError(f"table: shape {table.shape}, want [V, V] with V a multiple of 64")
    if np.any(table < 0) or not np.allclose(table.sum(axis=1), 1.0, atol=1e-6):
        raise ValueError("table: each row must hold probabilities that sum to 1")
    wide = table.astype(np.float64)
    logits = np.full_like(wide, LOGIT_OF_ZERO)
    np.log(wide, out=logits, where=wide > 0)
    config = _llama_config(
        {
            "vocab_size": size,
            "hidden_size": size,
            "num_hidden_layers": 1,
            "num_attention_heads": size // 64,
            "num_key_value_heads": 1,
            "intermediate_size": 32,
            "max_position_embeddings": max_position_embeddings,
            "eos_token_id": _plain(eos_token_id),
        }
    )
    tensors = _llama_tensors(config, seed=0)
    tensors["model.layers.0.self_attn.o_proj.weight"][:] = 0.0
    tensors["model.layers.0.mlp.down_proj.weight"][:] = 0.0
    tensors["model.embed_tokens.weight"] = 100.0 * np.eye(size, dtype=np.float32)
    tensors["model.norm.weight"] = np.ones(size, dtype=np.float32)
    tensors["lm_head.weight"] = (logits.T / np.sqrt(size)).astype(np.float32)
    _write_model(folder, config, tensors)


def write_s2_positions(
    folder: Path,
    script: Sequence[int],
    *,
    eos_token_id: int | None = T1_EOS,
    vocab_size: int = T1_VOCABULARY,
    num_positions: int = 256,
) -> None:
    """Writes S2: a GPT-2 that follows position p with the token `script[p]`, logit 20 against 0.

    A prompt of one token therefore gives the script; a prompt of n tokens gives script[n - 1:].
    Positions behind the script give `eos_token_id` (token 0 where that is None). Embeddings of
    tokens are zero, those of positions 100 x identity; the final norm's gain and shift turn its
    output into a unit vector, from which the untied head picks the scripted row.
    """
    if len(script) > num_positions:
        raise ValueError(f"script: {len(script)} tokens, at most {num_positions} positions")
    n = num_positions
    spread = 100.0 / n * np.sqrt(n - 1.0)  # standard deviation of 100 x unit vector
    low, high = -100.0 / n / spread, (100.0 - 100.0 / n) / spread
    head = np.zeros((vocab_size, n), dtype=np.float32)
    filler = [eos_token_id or 0] * (n - len(script))
    head[[*script, *filler], np.arange(n)] = 20.0

    def zeros(*shape: int) -> Floats:
        return np.zeros(shape, dtype=np.float32)

    layer = "transformer.h.0."
    ones = np.ones(n, dtype=np.float32)
    tensors = {
        "transformer.wte.weight": zeros(vocab_size, n),
        "transformer.wpe.weight": 100.0 * np.eye(n, dtype=np.float32),
        layer + "ln_1.weight": ones,
        layer + "ln_1.bias": zeros(n),
        layer + "attn.c_attn.weight": zeros(n, 3 * n),
        layer + "attn.c_attn.bias": zeros(3 * n),
        layer + "attn.c_proj.weight": zeros(n, n),
        layer + "attn.c_proj.bias": zeros(n),
        layer + "ln_2.weight": ones,
        layer + "ln_2.bias": zeros(n),
        layer + "mlp.c_fc.weight": zeros(n, n),
        layer + "mlp.c_fc.bias": zeros(n),
        layer + "mlp.c_proj.weight": zeros(n, n),
        layer + "mlp.c_proj.bias": zeros(n),
        "transformer.ln_f.weight": ones / np.float32(high - low),
        "transformer.ln_f.bias": -ones * np.float32(low / (high - low)),
        "lm_head.weight": head,
    }
    config: dict[str, object] = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_positions": n,
        "n_ctx": n,
        "n_embd": n,
        "n_layer": 1,
        "n_head": 4,
        "n_inner": n,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": T1_BOS,
        "eos_token_id": eos_token_id,
        "torch_dtype": "float32",
    }
    _write_model(folder, config, tensors)


def write_m2_random_llama(folder: Path, **config: object) -> None:
    """Writes M2: a random Llama; `config` overrides any key of its config.json.

    Default: 2 layers, hidden 48, 6 heads over 2 key-value heads, vocabulary 320 (T1), context 64,
    untied head. Keys that change the tensors (tie_word_embeddings, head_dim, attention_bias, sizes)
    are followed. Besides: `seed` (default 0) of the weights, and `shards` (default 1), the number
    of files that they are split over, with an index if there are several.
    """
    options = {"seed": 0, "shards": 1} | config
    seed, shards = _int(options, "seed"), _int(options, "shards")
    full = _llama_config({k: v for k, v in config.items() if k not in ("seed", "shards")})
    _write_model(folder, full, _llama_tensors(full, seed), shards)


def _llama_config(overrides: Mapping[str, object]) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": T1_VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": T1_BOS,
        "eos_token_id": T1_EOS,
        "torch_dtype": "float32",
    }
    return config | dict(overrides)


def _llama_tensors(config: Mapping[str, object], seed: int) -> dict[str, Floats]:
    """Random weights for a config; matrices keep the size of their input (std 1/sqrt(fan-in))."""
    random = np.random.default_rng(seed)
    hidden, inner = _int(config, "hidden_size"), _int(config, "intermediate_size")
    heads, kv_heads = _int(config, "num_attention_heads"), _int(config, "num_key_value_heads")
    head_dim = _int(config, "head_dim") if config.get("head_dim") else hidden // heads
    vocabulary = _int(config, "vocab_size")

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Floats:
        values = random.standard_normal((rows, columns)) * (scale / columns**0.5)
        return np.asarray(values, dtype=np.float32)

    def vector(size: int, mean: float) -> Floats:
        return np.asarray(mean + 0.1 * random.standard_normal(size), dtype=np.float32)

    tensors = {"model.embed_tokens.weight": matrix(vocabulary, hidden, hidden**0.5)}
    for k in range(_int(config, "num_hidden_layers")):
        layer = f"model.layers.{k}."
        tensors[layer + "input_layernorm.weight"] = vector(hidden, 1.0)
        tensors[layer + "post_attention_layernorm.weight"] = vector(hidden, 1.0)
        attention = {
            "q_proj": (heads * head_dim, hidden),
            "k_proj": (kv_heads * head_dim, hidden),
            "v_proj": (kv_heads * head_dim, hidden),
            "o_proj": (hidden, heads * head_dim),
        }
        for name, shape in attention.items():
            tensors[f"{layer}self_attn.{name}.weight"] = matrix(*shape)
            if config.get("attention_bias"):
                tensors[f"{layer}self_attn.{name}.bias"] = vector(shape[0], 0.0)
        mlp = {
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }
        for name, shape in mlp.items():
            tensors[f"{layer}mlp.{name}.weight"] = matrix(*shape)
            if config.get("mlp_bias"):
                tensors[f"{layer}mlp.{name}.bias"] = vector(shape[0], 0.0)
    tensors["model.norm.weight"] = vector(hidden, 1.0)
    if not config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = matrix(vocabulary, hidden, 2.0)
    return tensors


def _write_model(
    folder: Path, config: Mapping[str, object], tensors: Mapping[str, Floats], shards: int = 1
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **generation})
    files = [f"model-{k + 1:05}-of-{shards:05}.safetensors" for k in range(shards)]
    if shards == 1:
        files = ["model.safetensors"]
    weight_map = {name: files[k % shards] for k, name in enumerate(tensors)}
    for file in files:
        part = {
            name: np.ascontiguousarray(tensors[name])
            for name in tensors
            if weight_map[name] == file
        }
        save_file(part, folder / file, metadata={"format": "pt"})
    if shards > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)
    if not (folder / "tokenizer.json").exists():
        write_t1_tokenizer(folder)


def _int(config: Mapping[str, object], key: str) -> int:
    value = config[key]
    if not isinstance(value, int):
        raise TypeError(f"{key}: {value!r} is not an int")
    return value


def _plain(value: int | Sequence[int] | None) -> int | list[int] | None:
    return value if value is None or isinstance(value, int) else list(value)
