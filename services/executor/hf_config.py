"""config.json of a Hugging Face model folder -> ModelConfig.

Keys are sorted into those that are used, those that cannot change greedy logits, and the rest: a
key of the rest is refused unless its value says "off", because it may change the numbers.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

from triptych.services.executor.model_config import Activation, ModelConfig, Rope
from triptych.services.executor.quantization import read_quantization
from triptych.services.runtime.lifecycle import StartupError

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
_MAX_CONFIG_BYTES = 1 << 24

# Bookkeeping, training and generation settings: no influence on the logits of a token sequence.
_WITHOUT_EFFECT = frozenset(
    """
    architectures model_type transformers_version torch_dtype dtype auto_map initializer_range
    use_cache pad_token_id bos_token_id eos_token_id sep_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id attention_dropout attn_pdrop embd_pdrop resid_pdrop
    hidden_dropout output_hidden_states output_attentions return_dict return_dict_in_generate
    output_scores torchscript use_bfloat16 tf_legacy_loss id2label label2id
    problem_type finetuning_task task_specific_params tokenizer_class prefix chunk_size_feed_forward
    is_decoder cross_attention_hidden_size tie_encoder_decoder temperature top_k
    top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_beams num_beam_groups diversity_penalty
    num_return_sequences max_length min_length do_sample early_stopping suppress_tokens
    begin_suppress_tokens exponential_decay_length_penalty remove_invalid_values pretraining_tp
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    reorder_and_upcast_attn gradient_checkpointing unsloth_version unsloth_fixed n_ctx
    is_llama_config transformers.js_config max_window_layers
    """.split()  # noqa: SIM905 - a table of words
)
_LLAMA_KEYS = frozenset(
    """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings hidden_act rms_norm_eps rope_theta
    rope_scaling rope_parameters tie_word_embeddings attention_bias mlp_bias sliding_window
    use_sliding_window layer_types quantization_config attn_logit_softcapping
    final_logit_softcapping
    """.split()  # noqa: SIM905 - a table of words
)
_GPT2_KEYS = frozenset(
    """
    vocab_size n_embd n_inner n_layer n_head n_positions activation_function layer_norm_epsilon
    tie_word_embeddings scale_attn_weights scale_attn_by_inverse_layer_idx add_cross_attention
    """.split()  # noqa: SIM905 - a table of words
)


def read_hf_config(folder: Path) -> ModelConfig:
    """Read and check config.json. Raises StartupError naming the key and value it refuses."""
    path = folder / "config.json"
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise StartupError(f"{path}: larger than {_MAX_CONFIG_BYTES} bytes")
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise StartupError(f"{path}: not a JSON object")
    return _Reader(str(path), fields).config()


class _Reader:
    def __init__(self, source: str, fields: dict[str, object]) -> None:
        self._source = source
        self._fields = fields

    def config(self) -> ModelConfig:
        names = self._fields.get("architectures")
        architecture = names[0] if isinstance(names, list) and len(names) == 1 else None
        families: dict[str, Callable[[str], ModelConfig]] = {
            "LlamaForCausalLM": self._llama,
            "MistralForCausalLM": self._llama,
            "Qwen2ForCausalLM": self._llama,
            "GPT2LMHeadModel": self._gpt2,
        }
        if not isinstance(architecture, str) or architecture not in families:
            raise self._refused(
                f"architectures {names!r:.100} is not supported ({', '.join(families)} are)"
            )
        return families[architecture](architecture)

    def _llama(self, architecture: str) -> ModelConfig:
        self._refuse_unknown(_LLAMA_KEYS)
        heads, hidden = self._integer("num_attention_heads"), self._integer("hidden_size")
        # Explicit head_dim wins over the quotient, which need not even be whole.
        head_dim = self._integer("head_dim", hidden // max(heads, 1))
        qwen2 = architecture == "Qwen2ForCausalLM"
        bias = self._flag("attention_bias", default=False)
        max_position = self._integer("max_position_embeddings")
        return ModelConfig(
            source=self._source,
            architecture=architecture,
            family="llama",
            vocabulary_size=self._integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self._integer("intermediate_size"),
            num_layers=self._integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=self._integer("num_key_value_heads", heads),
            head_dim=head_dim,
            max_position=max_position,
            norm_epsilon=self._number("rms_norm_eps", 1e-6),
            activation=self._activation("hidden_act", "silu"),
            tied_head=self._flag("tie_word_embeddings", default=False),
            rope=self._rope(max_position),
            qkv_bias=bias or qwen2,
            output_bias=bias and not qwen2,
            mlp_bias=self._flag("mlp_bias", default=False),
            sliding_window=self._sliding_window(architecture),
            attention_soft_cap=self._number_or_none("attn_logit_softcapping"),
            logits_soft_cap=self._number_or_none("final_logit_softcapping"),
            quantization=read_quantization(self._source, self._fields.get("quantization_config")),
        )

    def _gpt2(self, architecture: str) -> ModelConfig:
        self._refuse_unknown(_GPT2_KEYS)
        if not self._flag("scale_attn_weights", default=True):
            raise self._refused("scale_attn_weights false is not supported")
        for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
            if self._flag(key, default=False):
                raise self._refused(f"{key} true is not supported")
        heads, hidden = self._integer("n_head"), self._integer("n_embd")
        if heads < 1 or hidden % heads:
            raise self._refused(f"n_embd {hidden} does not divide over n_head {heads}")
        return ModelConfig(
            source=self._source,
            architecture=architecture,
            family="gpt2",
            vocabulary_size=self._integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self._integer("n_inner", 4 * hidden),
            num_layers=self._integer("n_layer"),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            max_position=self._integer("n_positions"),
            norm_epsilon=self._number("layer_norm_epsilon", 1e-5),
            activation=self._activation("activation_function", "gelu_new"),
            tied_head=self._flag("tie_word_embeddings", default=True),
            rope=None,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
        )

    def _rope(self, max_position: int) -> Rope:
        # transformers 5 writes `rope_parameters`; older files have `rope_theta` + `rope_scaling`.
        merged: dict[str, object] = {}
        for name in ("rope_scaling", "rope_parameters"):
            part = self._fields.get(name)
            if part is not None and not isinstance(part, dict):
                raise self._refused(f"{name} {part!r:.100} is not an object")
            merged.update(part or {})
        inner = _Reader(f"{self._source}: rope", merged)
        theta = inner._number("rope_theta", self._number("rope_theta", 10000.0))
        kind = merged.get("rope_type", merged.get("type", "default"))
        known = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
        if inner._number("partial_rotary_factor", 1.0) != 1.0:
            raise inner._refused("partial_rotary_factor other than 1 is not supported")
        match kind:
            case "default" | None:
                rope = Rope(theta)
            case "linear":
                known.add("factor")
                rope = Rope(theta, "linear", inner._number("factor"))
            case "llama3":
                known |= {"factor", "low_freq_factor", "high_freq_factor"}
                rope = Rope(
                    theta,
                    "llama3",
                    inner._number("factor"),
                    inner._number("low_freq_factor"),
                    inner._number("high_freq_factor"),
                    inner._integer("original_max_position_embeddings", max_position),
                )
            case _:
                raise self._refused(
                    f"rope type {kind!r:.60} is not supported (default, linear, llama3 are)"
                )
        # Kept in the file by some exporters for every type; only llama3 reads it.
        known.add("original_max_position_embeddings")
        inner._refuse_unknown(frozenset(known))
        return rope

    def _sliding_window(self, architecture: str) -> int | None:
        used = architecture == "MistralForCausalLM"
        if architecture == "Qwen2ForCausalLM":
            if self._flag("use_sliding_window", default=False):
                raise self._refused("use_sliding_window true is not supported")
        elif self._flag("use_sliding_window", default=used) != used:
            raise self._refused("use_sliding_window contradicts the architecture")
        layers = self._fields.get("layer_types")
        if layers is not None and not (
            isinstance(layers, list) and all(each == "full_attention" for each in layers)
        ):
            raise self._refused(f"layer_types {layers!r:.100} are not supported")
        if self._fields.get("sliding_window") is None:
            return None
        window = self._integer("sliding_window")
        if used:
            return window
        # transformers' Llama has no window: whoever wrote the key may have had another network.
        said_off = architecture == "Qwen2ForCausalLM" or "use_sliding_window" in self._fields
        if not said_off and window < self._integer("max_position_embeddings"):
            raise self._refused(f"sliding_window {window} is not supported for {architecture}")
        return None

    def _activation(self, key: str, default: str) -> Activation:
        value = self._fields.get(key, default)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise self._refused(
                f"{key} {value!r:.60} is not supported ({', '.join(_ACTIVATIONS)} are)"
            )
        return _ACTIVATIONS[value]

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._fields.get(key)
        if value is None:
            value = default
        if value is None:
            raise self._refused(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._refused(f"{key} {value!r:.60} is not a whole number")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._fields.get(key)
        if value is None:
            value = default
        if value is None:
            raise self._refused(f"{key} is missing")
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise self._refused(f"{key} {value!r:.60} is not a finite number")
        return float(value)

    def _number_or_none(self, key: str) -> float | None:
        return None if self._fields.get(key) is None else self._number(key)

    def _flag(self, key: str, *, default: bool) -> bool:
        value = self._fields.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._refused(f"{key} {value!r:.60} is not true or false")
        return value

    def _refuse_unknown(self, known: frozenset[str]) -> None:
        for key, value in self._fields.items():
            off = value is None or value is False or value in ({}, [])
            if key in known or key in _WITHOUT_EFFECT or key.startswith("_") or off:
                continue
            raise self._refused(f"{key} = {value!r:.60} is not supported and may change the output")

    def _refused(self, why: str) -> StartupError:
        return StartupError(f"{self._source}: {why}")
