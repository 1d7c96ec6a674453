"""Llama, Mistral, Qwen2: RMS norms, rotary embedding, grouped queries, gated MLP."""

import torch

from triptych.kernels.reference.rms_norm import rms_norm
from triptych.kernels.reference.rotary import rotary
from triptych.kernels.reference.silu_gate import silu_gate
from triptych.services.executor.eager_attention import AttentionInputs, eager_attention
from triptych.services.executor.kv_storage import KvStorage
from triptych.services.executor.model_config import ModelConfig
from triptych.services.executor.models.layers import Linear, activate
from triptych.services.executor.rope_frequencies import inverse_frequencies


class Llama:
    """The family as a Network. Norm weights and rotary angles are float32 in every plan."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, rope_factors: torch.Tensor | None
    ) -> None:
        if config.rope is None:
            raise ValueError("a Llama has rotary positions")
        self._config = config
        self._embedding = torch.empty((config.vocabulary_size, config.hidden_size), dtype=dtype)
        self._layers = [_Layer(config, dtype) for _ in range(config.num_layers)]
        self._norm = torch.empty(config.hidden_size, dtype=torch.float32)
        self._head = self._embedding if config.tied_head else torch.empty_like(self._embedding)
        factors = None if rope_factors is None else rope_factors.numpy()
        self._frequencies = torch.from_numpy(
            inverse_frequencies(config.rope, config.head_dim, factors)
        )

    @property
    def head(self) -> torch.Tensor:
        """As `Network.head`."""
        return self._head

    def parameters(self) -> dict[str, torch.Tensor]:
        """As `Network.parameters`."""
        out = {"model.embed_tokens.weight": self._embedding}
        for index, layer in enumerate(self._layers):
            out |= layer.parameters(f"model.layers.{index}.")
        out["model.norm.weight"] = self._norm
        if not self._config.tied_head:
            out["lm_head.weight"] = self._head
        return out

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        storage: KvStorage,
    ) -> torch.Tensor:
        """As `Network.forward`."""
        hidden = self._embedding.index_select(0, token_ids)
        angles = torch.outer(positions.to(torch.float32), self._frequencies)
        cos, sin = angles.cos(), angles.sin()
        for index, layer in enumerate(self._layers):
            q, k, v = layer.projections(hidden, cos, sin)
            storage.store(index, attention.slots, k, v)
            mixed = eager_attention(q, storage, index, attention)
            hidden = hidden + layer.output(mixed.flatten(1))
            hidden = hidden + layer.mlp(hidden)
        return hidden

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `Network.final_norm`."""
        return rms_norm(hidden, self._norm, self._config.norm_epsilon)


class _Layer:
    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config = config
        hidden, inner = config.hidden_size, config.intermediate_size
        query, kv = config.query_size, config.kv_size
        self._attention_norm = torch.empty(hidden, dtype=torch.float32)
        self._qkv = Linear(hidden, query + 2 * kv, bias=config.qkv_bias, dtype=dtype)
        self.output = Linear(query, hidden, bias=config.output_bias, dtype=dtype)
        self._mlp_norm = torch.empty(hidden, dtype=torch.float32)
        self._gate_up = Linear(hidden, 2 * inner, bias=config.mlp_bias, dtype=dtype)
        self._down = Linear(inner, hidden, bias=config.mlp_bias, dtype=dtype)

    def parameters(self, prefix: str) -> dict[str, torch.Tensor]:
        config = self._config
        query, kv, inner = config.query_size, config.kv_size, config.intermediate_size
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return {
            prefix + "input_layernorm.weight": self._attention_norm,
            **self._qkv.part(attention + "q_proj", 0, query),
            **self._qkv.part(attention + "k_proj", query, kv),
            **self._qkv.part(attention + "v_proj", query + kv, kv),
            **self.output.part(attention + "o_proj", 0, config.hidden_size),
            prefix + "post_attention_layernorm.weight": self._mlp_norm,
            **self._gate_up.part(mlp + "gate_proj", 0, inner),
            **self._gate_up.part(mlp + "up_proj", inner, inner),
            **self._down.part(mlp + "down_proj", 0, config.hidden_size),
        }

    def projections(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, hidden] -> rotated q [T, heads, D], rotated k and plain v [T, kv_heads, D]."""
        config = self._config
        normed = rms_norm(hidden, self._attention_norm, config.norm_epsilon)
        heads = self._qkv(normed).view(
            -1, config.num_heads + 2 * config.num_kv_heads, config.head_dim
        )
        turned = rotary(heads[:, : config.num_heads + config.num_kv_heads], cos, sin)
        q, k = turned[:, : config.num_heads], turned[:, config.num_heads :]
        return q, k, heads[:, config.num_heads + config.num_kv_heads :]

    def mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(hidden, self._mlp_norm, self._config.norm_epsilon)
        gate_up = self._gate_up(normed)
        if self._config.activation == "silu":
            return self._down(silu_gate(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self._down(activate(gate, self._config.activation) * up)
