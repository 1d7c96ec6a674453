"""The operations of a step in plain torch: the meaning of the kernels, and what an emulated device
computes with.

On the CPU a row's numbers never depend on the other rows: what torch may compute in another order,
or with other instructions, where there are more rows (products, sums, exponentials) is computed row
by row, always with the same shapes.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the name that all torch code uses

from triptych.kernels.reference.quantized_weights import QuantizedWeight
from triptych.kernels.reference.rotary_store import rotary_store
from triptych.kernels.reference.token_sources import resolve_tokens
from triptych.kernels.sampler_params import NO_TOKEN
from triptych.services.executor.device.emulated_trace import kernel
from triptych.services.executor.device.ops import (
    AttentionForm,
    AttentionRows,
    KvLayer,
    SampleColumns,
    TopLogprobs,
)
from triptych.services.executor.device.reference_attention import attend
from triptych.services.executor.device.reference_sampling import ColumnSample
from triptych.services.executor.model_config import Activation


class ReferenceOps:
    """As `Ops`."""

    @kernel
    def embed(
        self, token_ids: torch.Tensor, table: torch.Tensor, first: int, out: torch.Tensor
    ) -> None:
        """As `Ops.embed`."""
        local = token_ids.long() - first
        outside = (local < 0) | (local >= len(table))
        out.copy_(table.index_select(0, local.masked_fill(outside, 0)))
        out.masked_fill_(outside.unsqueeze(1), 0)

    @kernel
    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        epsilon: float,
        out: torch.Tensor,
    ) -> None:
        """As `Ops.add_rms_norm`."""
        if residual is not None:
            residual.add_(x)
            x = residual
        wide = x.to(torch.float32)
        squares = torch.stack([row.square().mean() for row in wide]) + epsilon
        out.copy_(wide * (1.0 / squares.sqrt()).unsqueeze(1) * weight)

    @kernel
    def matmul(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """As `Ops.matmul`."""
        _multiply(x, weight.to(torch.float32), out, bias)

    @kernel
    def quantized_matmul(
        self,
        x: torch.Tensor,
        weight: QuantizedWeight,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """As `Ops.quantized_matmul`."""
        _multiply(x, weight.values(), out, bias)

    @kernel
    def rotary_store(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        slots: torch.Tensor,
        kv: KvLayer,
        num_heads: int,
    ) -> None:
        """As `Ops.rotary_store`."""
        rotary_store(qkv, positions, cos_sin, slots, kv.keys, kv.values, num_heads, kv.scales)

    @kernel
    def decode_attention(
        self,
        q: torch.Tensor,
        kv: KvLayer,
        rows: AttentionRows,
        out: torch.Tensor,
        workspace: torch.Tensor,
        form: AttentionForm,
    ) -> None:
        """As `Ops.decode_attention`."""
        attend(q, kv, rows, list(range(len(q) + 1)), out, form)

    @kernel
    def prefill_attention(
        self,
        q: torch.Tensor,
        kv: KvLayer,
        rows: AttentionRows,
        out: torch.Tensor,
        workspace: torch.Tensor,
        form: AttentionForm,
    ) -> None:
        """As `Ops.prefill_attention`."""
        assert rows.row_starts is not None
        attend(q, kv, rows, rows.row_starts.tolist(), out, form)

    def attention_workspace(
        self, num_rows: int, num_heads: int, head_dim: int, max_model_len: int
    ) -> int:
        """As `Ops.attention_workspace`: nearly nothing."""
        return 1

    @kernel
    def gate(self, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        """As `Ops.gate`."""
        for source, target in zip(gate_up.to(torch.float32), out, strict=True):
            gate, up = source.chunk(2)
            target.copy_(_activated(gate, activation) * up)

    @kernel
    def soft_cap(self, logits: torch.Tensor, cap: float) -> None:
        """As `Ops.soft_cap`."""
        for row in logits:
            row.div_(cap).tanh_().mul_(cap)

    @kernel
    def resolve_tokens(self, token_ids: torch.Tensor, previous: torch.Tensor) -> None:
        """As `Ops.resolve_tokens`."""
        resolve_tokens(token_ids, previous)

    @kernel
    def sample(
        self, logits: torch.Tensor, columns: SampleColumns, vocabulary_size: int, out: torch.Tensor
    ) -> None:
        """As `Ops.sample`; the host computes it."""
        rows, starts = columns.rows.tolist(), columns.history_starts.tolist()
        prompts = columns.history_prompts.tolist()
        history, params = columns.history.cpu().numpy(), columns.params.cpu().numpy()
        tokens = [NO_TOKEN] * len(rows)
        for index, row in enumerate(rows):
            if row < 0:
                continue
            start, stop = starts[index], starts[index + 1]
            middle = start + prompts[index]
            tokens[index] = ColumnSample.of(params[index]).draw(
                logits[row, :vocabulary_size].to(torch.float32).cpu().numpy(),
                history[start:middle],
                history[middle:stop],
            )
        out.copy_(torch.tensor(tokens, dtype=torch.int32))

    @kernel
    def top_logprobs(
        self,
        logits: torch.Tensor,
        columns: SampleColumns,
        vocabulary_size: int,
        token_ids: torch.Tensor,
        out: TopLogprobs,
    ) -> None:
        """As `Ops.top_logprobs`; the host computes it."""
        params = columns.params.cpu().numpy()
        for index, (row, token) in enumerate(
            zip(columns.rows.tolist(), token_ids.tolist(), strict=True)
        ):
            if row < 0:
                continue
            found = ColumnSample.of(params[index]).logprobs(
                logits[row, :vocabulary_size].to(torch.float32).cpu().numpy(), token
            )
            if found is None:
                continue
            count = len(found.top_ids)
            out.logprobs[index] = found.logprob
            out.ranks[index] = found.rank
            out.top_counts[index] = count
            out.top_ids[index, :count] = torch.from_numpy(found.top_ids)
            out.top_logprobs[index, :count] = torch.from_numpy(found.top_logprobs)


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """By a float32 weight, a row at a time, from and to the same two places for every row: a
    library may add up otherwise at another alignment."""
    row, product = weight.new_empty(weight.shape[1]), weight.new_empty(weight.shape[0])
    for source, target in zip(x, out, strict=True):
        row.copy_(source)
        torch.mv(weight, row, out=product)
        target.copy_(product if bias is None else product + bias)


def _activated(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    match activation:
        case "silu":
            return F.silu(gate)
        case "gelu_tanh":
            return F.gelu(gate, approximate="tanh")
        case "gelu":
            return F.gelu(gate)
        case "relu":
            return F.relu(gate)
