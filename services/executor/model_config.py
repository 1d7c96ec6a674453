"""The shape of a model: what the network needs to know besides its weights.

One type for all families and file formats. `hf_config` and `gguf_config` fill it; nothing that
changes the numbers is ever ignored: what is not supported is refused by name.
"""

import math
from dataclasses import dataclass
from typing import Literal

from triptych.services.executor.quantization import Quantization
from triptych.services.runtime.lifecycle import StartupError

Family = Literal["llama", "gpt2"]
Activation = Literal["silu", "gelu_tanh", "gelu", "relu"]

_MAX_EXTENT = 1 << 26
_MAX_LAYERS = 1 << 12
_CAPS = (1e-3, 1e6)  # it and its inverse must be float32, and no model is near either end


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding over the whole head: frequencies theta^(-2i / head_dim), then scaled.

    linear: all divided by `factor`. llama3: long waves divided by `factor`, short ones kept, a ramp
    between (transformers' `_compute_llama3_parameters`). A GGUF file may instead hold a divisor per
    frequency (`rope_freqs`), which the weights carry.
    """

    theta: float
    kind: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes in elements. Construction raises StartupError on sizes that contradict one another.

    `rope` None means learned positions. `sliding_window` W: a query sees itself and W - 1 earlier
    tokens, in every layer. A soft cap C turns x into C tanh(x / C): the scores before the softmax,
    the logits.
    """

    source: str
    architecture: str
    family: Family
    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_epsilon: float
    activation: Activation
    tied_head: bool
    rope: Rope | None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocabulary_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
            "num_kv_heads", "head_dim", "max_position",
        ):  # fmt: skip
            bound = _MAX_LAYERS if name == "num_layers" else _MAX_EXTENT
            value: int = getattr(self, name)
            if not 1 <= value <= bound:
                raise self.refused(f"{name} {value} is not within 1 and {bound}")
        if self.num_heads % self.num_kv_heads:
            raise self.refused(
                f"{self.num_heads} heads do not divide over {self.num_kv_heads} key-value heads"
            )
        if not (math.isfinite(self.norm_epsilon) and self.norm_epsilon > 0):
            raise self.refused(f"norm epsilon {self.norm_epsilon} is not a positive number")
        if self.rope is not None and self.head_dim % 2:
            raise self.refused(f"rotary embedding needs an even head_dim, not {self.head_dim}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise self.refused(f"sliding window {self.sliding_window} is below 1")
        for name in ("attention_soft_cap", "logits_soft_cap"):
            cap: float | None = getattr(self, name)
            if cap is not None and not _CAPS[0] <= cap <= _CAPS[1]:
                raise self.refused(f"{name} {cap} is not within {_CAPS[0]:g} and {_CAPS[1]:g}")
        if self.rope is not None:
            self._check_rope(self.rope)

    def _check_rope(self, rope: Rope) -> None:
        for name, value in (
            ("theta", rope.theta),
            ("factor", rope.factor),
            ("low_freq_factor", rope.low_freq_factor),
        ):
            if not (math.isfinite(value) and value > 0):
                raise self.refused(f"rope {name} {value} is not a positive number")
        if rope.kind == "llama3" and not (
            rope.high_freq_factor > rope.low_freq_factor and rope.original_max_position >= 1
        ):
            raise self.refused(
                f"rope type llama3 needs high_freq_factor {rope.high_freq_factor} above "
                f"low_freq_factor {rope.low_freq_factor} and original_max_position_embeddings "
                f"{rope.original_max_position} above 0"
            )

    def context_within(self, asked: int | None) -> int:
        """The longest sequence to allow. Raises StartupError when `asked` exceeds the context."""
        if asked is None:
            return self.max_position
        if not 1 <= asked <= self.max_position:
            raise self.refused(
                f"max_model_len {asked} is not within 1 and the model's context of "
                f"{self.max_position} tokens"
            )
        return asked

    def refused(self, why: str) -> StartupError:
        """The error to raise when this model cannot be run."""
        return StartupError(f"{self.source}: {why}")

    @property
    def query_size(self) -> int:
        """Elements of all query heads of a token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all key heads (or value heads) of a token."""
        return self.num_kv_heads * self.head_dim
