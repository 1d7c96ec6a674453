"""Metadata and tensor names of a GGUF file -> ModelConfig.

Keys of the architecture are known or refused. What the metadata does not say (biases, an untied
head) is read from the presence of tensors, as llama.cpp does.
"""

from typing import NoReturn

from triptych.services.executor.model_config import ModelConfig, Rope
from triptych.services.runtime.gguf_file import GgufFile
from triptych.services.runtime.lifecycle import StartupError

ROPE_FACTORS = "rope_freqs.weight"

_KNOWN_KEYS = frozenset(
    """
    block_count context_length embedding_length feed_forward_length vocab_size
    attention.head_count attention.head_count_kv attention.key_length attention.value_length
    attention.layer_norm_rms_epsilon attention.layer_norm_epsilon attention.sliding_window
    attention.causal attn_logit_softcapping final_logit_softcapping
    rope.freq_base rope.dimension_count rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.finetuned rope.scale_linear expert_count
    expert_used_count tensor_data_layout use_parallel_residual
    """.split()  # noqa: SIM905 - a table of words
)


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """Read and check the metadata. Raises StartupError naming the key and value it refuses."""
    return _Reader(file).config()


class _Reader:
    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._architecture = file.text("general.architecture") or self._fail(
            "general.architecture is missing"
        )

    def config(self) -> ModelConfig:
        if self._architecture not in ("llama", "qwen2", "gpt2"):
            self._fail(
                f"architecture {self._architecture!r:.60} is not supported (llama, qwen2, gpt2 are)"
            )
        self._refuse_unsupported()
        gpt2 = self._architecture == "gpt2"
        heads, hidden = self._integer("attention.head_count"), self._integer("embedding_length")
        head_dim = self._integer("attention.key_length", hidden // max(heads, 1))
        if self._integer("attention.value_length", head_dim) != head_dim:
            self._fail("attention.value_length differs from attention.key_length")
        if self._integer("rope.dimension_count", head_dim) != head_dim:
            self._fail(
                f"rope.dimension_count {self._integer('rope.dimension_count')} differs from the "
                f"head size {head_dim}: rotation of a part of the head is not supported"
            )
        epsilon = "attention.layer_norm_epsilon" if gpt2 else "attention.layer_norm_rms_epsilon"
        return ModelConfig(
            source=str(self._file.path),
            architecture=self._architecture,
            family="gpt2" if gpt2 else "llama",
            vocabulary_size=self._vocabulary_size(),
            hidden_size=hidden,
            intermediate_size=self._integer("feed_forward_length"),
            num_layers=self._integer("block_count"),
            num_heads=heads,
            num_kv_heads=self._integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_position=self._integer("context_length"),
            norm_epsilon=self._number(epsilon),
            activation="gelu_tanh" if gpt2 else "silu",
            tied_head="output.weight" not in self._file.tensors,
            rope=None if gpt2 else self._rope(),
            qkv_bias=gpt2 or self._has("blk.0.attn_q.bias"),
            output_bias=gpt2 or self._has("blk.0.attn_output.bias"),
            mlp_bias=gpt2 or self._has("blk.0.ffn_down.bias"),
            sliding_window=self._window(),
            attention_soft_cap=self._soft_cap("attn_logit_softcapping"),
            logits_soft_cap=self._soft_cap("final_logit_softcapping"),
        )

    def _refuse_unsupported(self) -> None:
        prefix = self._architecture + "."
        for key, value in self._file.metadata.items():
            if not key.startswith(prefix) or key.removeprefix(prefix) in _KNOWN_KEYS:
                continue
            self._fail(f"{key} = {value!r:.60} is not supported and may change the output")
        for key in ("expert_count", "expert_used_count"):
            if self._integer(key, 0):
                self._fail(f"{key} {self._integer(key)}: mixtures of experts are not supported")
        if self._file.metadata.get(prefix + "attention.causal", True) is not True:
            self._fail("attention.causal false is not supported")
        if self._file.metadata.get(prefix + "use_parallel_residual", False) is not False:
            self._fail("use_parallel_residual is not supported")
        layout = self._file.text(prefix + "tensor_data_layout")
        if layout not in (None, "Meta AI original pth"):
            self._fail(f"tensor_data_layout {layout!r:.60} is not supported")
        if self._file.metadata.get("split.count", 1) not in (0, 1):
            self._fail("split GGUF files are not supported; merge them first")

    def _vocabulary_size(self) -> int:
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None:
            self._fail("tensor token_embd.weight is missing")
        declared = self._file.integer(f"{self._architecture}.vocab_size")
        if declared is not None and declared != embedding.shape[0]:
            self._fail(f"vocab_size {declared}, but token_embd.weight is {embedding.shape}")
        return embedding.shape[0]

    def _rope(self) -> Rope:
        theta = self._number("rope.freq_base", 10000.0)
        # As llama.cpp reads it: a factor alone is linear, type "none" makes a factor nothing.
        kind = self._file.text(f"{self._architecture}.rope.scaling.type") or "linear"
        factor = self._number("rope.scaling.factor", self._number("rope.scale_linear", 1.0))
        if kind not in ("none", "linear"):
            self._fail(f"rope.scaling.type {kind!r:.60} is not supported (none, linear are)")
        if kind == "none" or factor in (0.0, 1.0):
            return Rope(theta)
        return Rope(theta, "linear", factor)

    def _window(self) -> int | None:
        return self._integer("attention.sliding_window", 0) or None

    def _soft_cap(self, key: str) -> float | None:
        return self._number(key, 0.0) or None

    def _has(self, tensor: str) -> bool:
        return tensor in self._file.tensors

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._file.integer(f"{self._architecture}.{key}")
        value = default if value is None else value
        if value is None:
            self._fail(f"{self._architecture}.{key} is missing")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._file.number(f"{self._architecture}.{key}")
        value = default if value is None else value
        if value is None:
            self._fail(f"{self._architecture}.{key} is missing")
        return value

    def _fail(self, why: str) -> NoReturn:
        raise StartupError(f"{self._file.path}: {why}")
