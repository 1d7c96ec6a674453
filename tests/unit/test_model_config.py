"""config.json and GGUF metadata -> ModelConfig: right values, and refusals by name."""

import json
from pathlib import Path

import pytest

from gguf_files import RawGguf, RawTensor, scalar, string
from triptych.services.executor.gguf_config import read_gguf_config
from triptych.services.executor.hf_config import read_hf_config
from triptych.services.executor.model_config import ModelConfig, Rope
from triptych.services.runtime.gguf_file import open_gguf
from triptych.services.runtime.lifecycle import StartupError

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96,
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "torch_dtype": "bfloat16", "bos_token_id": 1,
}  # fmt: skip
GPT2: dict[str, object] = {
    "architectures": ["GPT2LMHeadModel"], "vocab_size": 50, "n_embd": 24, "n_head": 3,
    "n_layer": 2, "n_positions": 64,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def hf(folder: Path, base: dict[str, object], **changes: object) -> ModelConfig:
    fields = {key: value for key, value in {**base, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(fields))
    return read_hf_config(folder)


def test_llama(tmp_path: Path) -> None:
    config = hf(tmp_path, LLAMA)
    assert config.family == "llama"
    assert (config.hidden_size, config.head_dim, config.query_size, config.kv_size) == (
        48,
        8,
        48,
        16,
    )
    assert (config.num_layers, config.max_position, config.norm_epsilon) == (2, 128, 1e-5)
    assert config.rope == Rope(5000.0)
    assert not (config.tied_head)
    assert not (config.qkv_bias)
    assert not (config.output_bias)
    assert not (config.mlp_bias)
    biased = hf(tmp_path, LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert biased.tied_head
    assert biased.qkv_bias
    assert biased.output_bias
    assert biased.mlp_bias


def test_explicit_head_dim_wins(tmp_path: Path) -> None:
    """R51, also where hidden does not divide by the heads."""
    assert (
        hf(tmp_path, LLAMA, num_attention_heads=3, num_key_value_heads=1, head_dim=32).head_dim
        == 32
    )
    odd = hf(tmp_path, LLAMA, num_attention_heads=7, num_key_value_heads=1, head_dim=10)
    assert (odd.hidden_size, odd.query_size) == (48, 70)
    assert hf(tmp_path, LLAMA, head_dim=None).head_dim == 8


def test_defaults(tmp_path: Path) -> None:
    config = hf(tmp_path, LLAMA, num_key_value_heads="absent", rope_theta="absent")
    assert config.num_kv_heads == 6
    assert config.rope == Rope(10000.0)
    gpt2 = hf(tmp_path, GPT2)
    assert gpt2.tied_head
    assert (gpt2.intermediate_size, gpt2.head_dim, gpt2.rope) == (96, 8, None)
    assert gpt2.activation == "gelu_tanh"
    assert not hf(tmp_path, GPT2, tie_word_embeddings=False).tied_head


def test_rope_forms(tmp_path: Path) -> None:
    wanted = Rope(5000.0, "llama3", 8.0, 1.0, 4.0, 32)
    assert hf(tmp_path, LLAMA, rope_scaling=LLAMA3).rope == wanted
    new = {**LLAMA3, "rope_theta": 5000.0}
    assert hf(tmp_path, LLAMA, rope_theta="absent", rope_parameters=new).rope == wanted
    linear = hf(tmp_path, LLAMA, rope_scaling={"type": "linear", "factor": 2}).rope
    assert linear == Rope(5000.0, "linear", 2.0)
    assert hf(tmp_path, LLAMA, rope_scaling={"rope_type": "default"}).rope == Rope(5000.0)


def test_mistral_and_qwen2(tmp_path: Path) -> None:
    mistral = hf(tmp_path, LLAMA, architectures=["MistralForCausalLM"], sliding_window=4)
    assert mistral.sliding_window == 4
    assert (
        hf(
            tmp_path, LLAMA, architectures=["MistralForCausalLM"], sliding_window=None
        ).sliding_window
        is None
    )
    qwen = hf(
        tmp_path, LLAMA, architectures=["Qwen2ForCausalLM"], use_sliding_window=False,
        sliding_window=32, max_window_layers=1, layer_types=["full_attention"] * 2,
    )  # fmt: skip
    assert qwen.qkv_bias
    assert not qwen.output_bias
    assert qwen.sliding_window is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures .*Mamba.* is not supported"),
        ({"architectures": "absent"}, "architectures None"),
        ({"architectures": ["LlamaForCausalLM", "X"]}, "architectures"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"hidden_size": "48"}, "hidden_size '48' is not a whole number"),
        ({"hidden_size": True}, "hidden_size True"),
        ({"hidden_size": 0}, "hidden_size 0 is not within 1"),
        ({"num_hidden_layers": 10**9}, "num_layers 1000000000"),
        ({"num_attention_heads": 0}, "num_heads 0"),
        ({"num_key_value_heads": 4}, "6 heads do not divide over 4"),
        ({"num_key_value_heads": 0}, "num_kv_heads 0"),
        ({"head_dim": 7}, "even head_dim, not 7"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan"),
        ({"rms_norm_eps": -1.0}, "norm epsilon -1.0"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        ({"rope_theta": 0}, "rope theta 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope type 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope: factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope factor 0"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "attention_factor": 2.0}}, "attention_factor"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"sliding_window": 4, "use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"logit_scale": 0.5}, "logit_scale = 0.5 is not supported and may change"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"attention_bias": 1}, "attention_bias 1 is not true or false"),
        ({"sliding_window": 64}, "sliding_window 64 is not supported for LlamaForCausalLM"),
        ({"rope_interleaved": True}, "rope_interleaved = True is not supported"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder = True"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar = 256"),
        ({"attention_multiplier": 0.1}, "attention_multiplier"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"sliding_window_pattern": 6}, "sliding_window_pattern"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"attn_logit_softcapping": 0.0}, "attention_soft_cap 0.0 is not within 0.001 and"),
        (
            {"final_logit_softcapping": 1e300},
            r"logits_soft_cap 1e\+300 is not within 0\.001 and 1e",
        ),
        ({"final_logit_softcapping": -30.0}, "logits_soft_cap -30.0"),
        ({"attn_logit_softcapping": "50"}, "attn_logit_softcapping '50' is not a finite number"),
    ],
)
def test_refusals(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=message) as caught:
        hf(tmp_path, LLAMA, **changes)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"n_head": 5}, "n_embd 24 does not divide over n_head 5"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
    ],
)
def test_gpt2_refusals(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=message):
        hf(tmp_path, GPT2, **changes)


@pytest.mark.parametrize("content", ["", "[1]", "{", "[" * 100_000])
def test_broken_json(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(StartupError, match=r"config\.json: not"):
        read_hf_config(tmp_path)


def test_off_and_bookkeeping_keys_are_fine(tmp_path: Path) -> None:
    hf(tmp_path, LLAMA, _name_or_path="x", use_cache=True, new_feature=False, other=None)
    hf(tmp_path, LLAMA, pruned_heads={}, rope_interleaved=False, sliding_window=128)
    hf(tmp_path, LLAMA, sliding_window=64, use_sliding_window=False)


def test_soft_caps(tmp_path: Path) -> None:
    plain = hf(tmp_path, LLAMA, attn_logit_softcapping=None)
    assert (plain.attention_soft_cap, plain.logits_soft_cap) == (None, None)
    capped = hf(tmp_path, LLAMA, attn_logit_softcapping=50, final_logit_softcapping=30.0)
    assert (capped.attention_soft_cap, capped.logits_soft_cap) == (50.0, 30.0)
    path = tmp_path / "m.gguf"
    assert gguf(path, {}).attention_soft_cap is None
    config = gguf(
        path,
        {
            "llama.attn_logit_softcapping": scalar("f32", 50.0),
            "llama.final_logit_softcapping": scalar("f32", 30.0),
        },
    )
    assert (config.attention_soft_cap, config.logits_soft_cap) == (50.0, 30.0)


def test_gguf_rope_scaling_without_a_type_is_linear(tmp_path: Path) -> None:
    """llama.cpp's default; files of before the key existed have a factor alone."""
    path = tmp_path / "m.gguf"
    factor: dict[str, bytes | None] = {"llama.rope.scaling.factor": scalar("f32", 4.0)}
    assert gguf(path, factor).rope == Rope(10000.0, "linear", 4.0)
    legacy: dict[str, bytes | None] = {"llama.rope.scale_linear": scalar("f32", 2.0)}
    assert gguf(path, legacy).rope == Rope(10000.0, "linear", 2.0)
    for made in (factor, legacy):
        made["llama.rope.scaling.type"] = string("none")
        assert gguf(path, made).rope == Rope(10000.0)
    assert gguf(path, {"llama.rope.scale_linear": scalar("f32", 1.0)}).rope == Rope(10000.0)


GGUF = {
    "general.architecture": string("llama"),
    "llama.block_count": scalar("u32", 2),
    "llama.context_length": scalar("u32", 64),
    "llama.embedding_length": scalar("u32", 48),
    "llama.feed_forward_length": scalar("u32", 80),
    "llama.attention.head_count": scalar("u32", 6),
    "llama.attention.head_count_kv": scalar("u32", 2),
    "llama.attention.layer_norm_rms_epsilon": scalar("f32", 1e-5),
}
EMBEDDING = RawTensor("token_embd.weight", (4, 9), 0, bytes(144))


def gguf(path: Path, changes: dict[str, bytes | None], *names: str) -> ModelConfig:
    metadata = {key: value for key, value in {**GGUF, **changes}.items() if value is not None}
    extra = [RawTensor(name, (1,), 0, bytes(4)) for name in names]
    path.write_bytes(RawGguf(metadata, [EMBEDDING, *extra]).write())
    return read_gguf_config(open_gguf(path))


def test_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    config = gguf(path, {})
    assert (config.vocabulary_size, config.head_dim, config.num_kv_heads) == (9, 8, 2)
    assert config.tied_head
    assert config.rope == Rope(10000.0)
    assert not (config.qkv_bias)
    assert not (config.output_bias)
    assert not (config.mlp_bias)
    assert not gguf(path, {}, "output.weight").tied_head
    assert gguf(path, {}, "blk.0.attn_q.bias").qkv_bias
    wide = gguf(
        path,
        {
            "llama.attention.key_length": scalar("u32", 32),
            "llama.attention.value_length": scalar("u32", 32),
            "llama.rope.dimension_count": scalar("u32", 32),
            "llama.rope.scaling.type": string("linear"),
            "llama.rope.scaling.factor": scalar("f32", 4.0),
            "llama.attention.sliding_window": scalar("u32", 16),
        },
    )
    assert (wide.head_dim, wide.query_size, wide.sliding_window) == (32, 192, 16)
    assert wide.rope == Rope(10000.0, "linear", 4.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": string("mamba")}, "architecture 'mamba' is not supported"),
        ({"general.architecture": None}, "general.architecture is missing"),
        ({"general.architecture": scalar("u32", 1)}, "general.architecture is not a string"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": string("2")}, "llama.block_count is not a whole number"),
        ({"llama.attention.head_count": scalar("u32", 0)}, "num_heads 0"),
        ({"llama.attention.head_count_kv": scalar("u32", 0)}, "num_kv_heads 0"),
        ({"llama.embedding_length": scalar("i32", -48)}, "hidden_size -48"),
        ({"llama.context_length": scalar("u64", 2**63)}, "max_position"),
        ({"llama.vocab_size": scalar("u32", 8)}, "vocab_size 8, but token_embd"),
        ({"llama.rope.dimension_count": scalar("u32", 4)}, "rope.dimension_count 4"),
        ({"llama.rope.scaling.type": string("yarn")}, "'yarn' is not supported"),
        ({"llama.rope.freq_base": scalar("f32", float("nan"))}, "rope theta nan"),
        ({"llama.expert_count": scalar("u32", 8)}, "mixtures of experts"),
        ({"llama.logit_scale": scalar("f32", 2.0)}, "llama.logit_scale .* not supported"),
        ({"llama.attention.scale": scalar("f32", 0.1)}, "llama.attention.scale"),
        ({"llama.attn_logit_softcapping": scalar("f32", -1.0)}, "attention_soft_cap -1.0"),
        ({"llama.rope.scaling.attn_factor": scalar("f32", 2.0)}, "rope.scaling.attn_factor"),
        ({"split.count": scalar("u16", 2)}, "split GGUF"),
    ],
)
def test_gguf_refusals(changes: dict[str, bytes | None], message: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=message):
        gguf(tmp_path / "m.gguf", changes)
