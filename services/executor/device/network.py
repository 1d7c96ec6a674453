"""The Llama family as a sequence of operations over static buffers: Llama, Mistral, Qwen2.

Calling it with other contents in the same buffers is the same launches, so it can be captured as a
graph. It allocates nothing, reads nothing back, and knows nothing of graphs, requests or weights'
formats.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triptych.services.executor.collectives import Collectives
from triptych.services.executor.device.linear import Linear
from triptych.services.executor.device.ops import AttentionForm, AttentionRows, KvLayer, Ops
from triptych.services.executor.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Of one layer, as a rank has them. Norms are float32 [hidden]."""

    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class NetworkWeights:
    """All of a rank. `embedding` holds the vocabulary from id `first_id` on; `head` as many rows
    on every rank, those behind the vocabulary zero. cos_sin float32 [max_model_len, head_dim]."""

    embedding: torch.Tensor
    first_id: int
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Linear
    cos_sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class NetworkForm:
    """Sizes as a rank sees them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class Activations:
    """What lies between the operations, for up to T tokens and L rows of logits.

    residual, branch, normed [T, H]; qkv [T, (N + 2M) * D]; mixed [T, N * D]; gate_up [T, 2F];
    gated [T, F]; wanted_residual, wanted_branch, wanted_normed [L, H]; logits_part float32
    [L, V / ranks]; logits float32 [L, V]: the same memory for one rank, None on ranks above 0.
    """

    residual: torch.Tensor
    branch: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    mixed: torch.Tensor
    gate_up: torch.Tensor
    gated: torch.Tensor
    wanted_residual: torch.Tensor
    wanted_branch: torch.Tensor
    wanted_normed: torch.Tensor
    logits_part: torch.Tensor
    logits: torch.Tensor | None
    workspace: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all."""
        return sum(
            value.nbytes
            for name in self.__slots__
            if isinstance(value := getattr(self, name), torch.Tensor)
        )


@dataclass(frozen=True, slots=True)
class Network:
    """Weights and cache of a rank, and the operations in order."""

    config: ModelConfig
    form: NetworkForm
    weights: NetworkWeights
    cache: Sequence[KvLayer]
    ops: Ops
    collectives: Collectives

    def forward(
        self,
        buffers: Activations,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        rows: AttentionRows,
    ) -> None:
        """Tokens int32 [T] -> buffers.residual and .branch [:T], whose sum is the hidden state.

        Stores the tokens' keys and values. Rows of one token are decoded: without
        `rows.row_starts`, T is the number of rows.
        """
        count, ops, config = len(token_ids), self.ops, self.config
        residual, branch = buffers.residual[:count], buffers.branch[:count]
        normed = buffers.normed[:count]
        ops.embed(token_ids, self.weights.embedding, self.weights.first_id, residual)
        self.collectives.all_reduce(residual)
        for index, layer in enumerate(self.weights.layers):
            if index == 0:
                ops.add_rms_norm(residual, None, layer.attention_norm, config.norm_epsilon, normed)
            else:
                ops.add_rms_norm(
                    branch, residual, layer.attention_norm, config.norm_epsilon, normed
                )
            self._attention(buffers, layer, self.cache[index], positions, slots, rows)
            self.collectives.all_reduce(branch)
            ops.add_rms_norm(branch, residual, layer.mlp_norm, config.norm_epsilon, normed)
            gate_up, gated = buffers.gate_up[:count], buffers.gated[:count]
            layer.gate_up.apply(ops, normed, gate_up)
            ops.gate(gate_up, config.activation, gated)
            layer.down.apply(ops, gated, branch)
            self.collectives.all_reduce(branch)

    def _attention(
        self,
        buffers: Activations,
        layer: LayerWeights,
        kv: KvLayer,
        positions: torch.Tensor,
        slots: torch.Tensor,
        rows: AttentionRows,
    ) -> None:
        """buffers.normed -> buffers.branch."""
        count, form, ops = len(positions), self.form, self.ops
        qkv, mixed = buffers.qkv[:count], buffers.mixed[:count]
        layer.qkv.apply(ops, buffers.normed[:count], qkv)
        ops.rotary_store(qkv, positions, self.weights.cos_sin, slots, kv, form.num_heads)
        heads = form.num_heads + 2 * form.num_kv_heads
        q = qkv.view(count, heads, form.head_dim)[:, : form.num_heads]
        out = mixed.view(count, form.num_heads, form.head_dim)
        attend = ops.decode_attention if rows.row_starts is None else ops.prefill_attention
        attend(q, kv, rows, out, buffers.workspace, attention_form(self.config))
        layer.output.apply(ops, mixed, buffers.branch[:count])

    def logits(self, buffers: Activations, tokens: torch.Tensor) -> None:
        """Hidden states of tokens int32 [L] of the step -> buffers.logits[:L] (of rank 0)."""
        count, config = len(tokens), self.config
        residual, branch = buffers.wanted_residual[:count], buffers.wanted_branch[:count]
        normed = buffers.wanted_normed[:count]
        torch.index_select(buffers.residual, 0, tokens, out=residual)
        torch.index_select(buffers.branch, 0, tokens, out=branch)
        self.ops.add_rms_norm(branch, residual, self.weights.norm, config.norm_epsilon, normed)
        part = buffers.logits_part[:count]
        self.weights.head.apply(self.ops, normed, part)
        out = None if buffers.logits is None else buffers.logits[:count]
        if self.collectives.size > 1:
            self.collectives.gather_columns(part, out)
        if out is not None and config.logits_soft_cap is not None:
            self.ops.soft_cap(out, config.logits_soft_cap)


def attention_form(config: ModelConfig) -> AttentionForm:
    """What a model's attention is like."""
    return AttentionForm(
        scale=config.head_dim**-0.5,
        window=config.sliding_window,
        soft_cap=config.attention_soft_cap,
    )
