"""GPT-2: learned positions, layer norms, plain MLP, biases everywhere."""

import torch
import torch.nn.functional as F  # noqa: N812 - the name that all torch code uses

from triptych.services.executor.eager_attention import AttentionInputs, eager_attention
from triptych.services.executor.kv_storage import KvStorage
from triptych.services.executor.model_config import ModelConfig
from triptych.services.executor.models.layers import Linear, activate


class Gpt2:
    """The family as a Network. Checkpoints hold matrices as [inputs, outputs] (`Conv1D`)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config = config
        self._embedding = torch.empty((config.vocabulary_size, config.hidden_size), dtype=dtype)
        self._positions = torch.empty((config.max_position, config.hidden_size), dtype=dtype)
        self._layers = [_Layer(config, dtype) for _ in range(config.num_layers)]
        self._norm = _LayerNorm(config)
        self._head = self._embedding if config.tied_head else torch.empty_like(self._embedding)

    @property
    def head(self) -> torch.Tensor:
        """As `Network.head`."""
        return self._head

    def parameters(self) -> dict[str, torch.Tensor]:
        """As `Network.parameters`."""
        out = {
            "transformer.wte.weight": self._embedding,
            "transformer.wpe.weight": self._positions,
        }
        for index, layer in enumerate(self._layers):
            out |= layer.parameters(f"transformer.h.{index}.")
        out |= self._norm.parameters("transformer.ln_f")
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
        hidden = hidden + self._positions.index_select(0, positions)
        for index, layer in enumerate(self._layers):
            q, k, v = layer.projections(hidden)
            storage.store(index, attention.slots, k, v)
            mixed = eager_attention(q, storage, index, attention)
            hidden = hidden + layer.output(mixed.flatten(1))
            hidden = hidden + layer.mlp(hidden)
        return hidden

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `Network.final_norm`."""
        return self._norm(hidden)


class _LayerNorm:
    def __init__(self, config: ModelConfig) -> None:
        self._weight = torch.empty(config.hidden_size, dtype=torch.float32)
        self._bias = torch.empty(config.hidden_size, dtype=torch.float32)
        self._epsilon = config.norm_epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # torch's own: one pass where kernels/reference/layer_norm.py, which defines it, takes six.
        shape = self._weight.shape
        wide = F.layer_norm(x.to(torch.float32), shape, self._weight, self._bias, self._epsilon)
        return wide.to(x.dtype)

    def parameters(self, name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": self._weight, f"{name}.bias": self._bias}


class _Layer:
    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config = config
        hidden, inner = config.hidden_size, config.intermediate_size
        self._attention_norm = _LayerNorm(config)
        self._qkv = Linear(hidden, 3 * hidden, bias=True, dtype=dtype)
        self.output = Linear(hidden, hidden, bias=True, dtype=dtype)
        self._mlp_norm = _LayerNorm(config)
        self._up = Linear(hidden, inner, bias=True, dtype=dtype)
        self._down = Linear(inner, hidden, bias=True, dtype=dtype)

    def parameters(self, prefix: str) -> dict[str, torch.Tensor]:
        out = {
            **self._attention_norm.parameters(prefix + "ln_1"),
            **self._mlp_norm.parameters(prefix + "ln_2"),
        }
        for name, linear in (
            ("attn.c_attn", self._qkv),
            ("attn.c_proj", self.output),
            ("mlp.c_fc", self._up),
            ("mlp.c_proj", self._down),
        ):
            part = linear.part(prefix + name, 0, linear.weight.shape[0])
            part[f"{prefix}{name}.weight"] = linear.weight.T
            out |= part
        return out

    def projections(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, hidden] -> q, k, v, each [T, heads, head_dim]."""
        heads = self._qkv(self._attention_norm(hidden))
        q, k, v = heads.view(-1, 3, self._config.num_heads, self._config.head_dim).unbind(1)
        return q, k, v

    def mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        up = self._up(self._mlp_norm(hidden))
        return self._down(activate(up, self._config.activation))
