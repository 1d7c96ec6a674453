"""The operations of a step on a device: one method a kernel, over tensors that are there already.

`reference_ops` computes them with plain torch (and is batch-invariant on the CPU), `triton_ops`
with the kernels of kernels/triton. All write into tensors that they are given, in the order of the
device's current stream, and none waits for the device: so a step can be captured as a graph.

T tokens, R rows (sequences), H hidden, N heads, M key-value heads, D head_dim, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from triptych.kernels.reference.quantized_weights import QuantizedWeight
from triptych.services.executor.model_config import Activation


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Keys and values of a layer, each [blocks, block_size, M, D].

    `scales`: of keys and values, float32 [blocks, block_size, M] each, where those are int8 or
    float8; None where they are floats. What lies behind a sequence's last token is anything, NaN
    included, and must have no influence.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """What attention is like in every layer. `window` W: a query sees itself and W - 1 tokens
    before it. `soft_cap` C: scores s become C tanh(s / C)."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Which tokens are whose. int32.

    block_tables [R, B], anything behind a row's last block; kv_lengths [R]: tokens of the row's
    sequence after this step, 0 for padding, whose results are zeros. row_starts [R + 1] where rows
    may have several tokens; None where each has one.
    """

    block_tables: torch.Tensor
    kv_lengths: torch.Tensor
    row_starts: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class SampleFeatures:
    """What some sample of a step asks for, as the host knows: kernels for the rest are left out.

    `noise`: a temperature above 0.
    """

    noise: bool = True
    top_k: bool = True
    top_p: bool = True
    penalties: bool = True


@dataclass(frozen=True, slots=True)
class SampleColumns:
    """What the samples of a step draw from, and how. int32, as `StepLayout` has it.

    rows [S], -1 where nothing is to be drawn; params [S, len(SAMPLE_COLUMNS)]; history_starts
    [S + 1]; history_prompts [S]; history, without PREVIOUS_SAMPLE ids any more.
    """

    rows: torch.Tensor
    params: torch.Tensor
    history_starts: torch.Tensor
    history_prompts: torch.Tensor
    history: torch.Tensor
    features: SampleFeatures


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Where logprobs of samples go: logprobs float32 [S], ranks int32 [S], top_counts int32 [S],
    top_ids int32 [S, k], top_logprobs float32 [S, k]. Rows of samples that ask for none, or have
    no token, hold anything."""

    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_counts: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


class Ops(Protocol):
    """The kernels of a step. No method allocates what must outlive it, none synchronises."""

    def embed(
        self, token_ids: torch.Tensor, table: torch.Tensor, first: int, out: torch.Tensor
    ) -> None:
        """out [T, H] = table[token_ids - first], zeros where an id is not in the table.

        token_ids int32 [T]; `table` holds the vocabulary from id `first` on.
        """

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        epsilon: float,
        out: torch.Tensor,
    ) -> None:
        """residual += x (rounded to its dtype) if there is one; out = norm(residual or x) * weight.

        x, residual, out [T, H]; weight float32 [H].
        """

    def matmul(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """out [T, O] = x [T, K] weight [O, K]^T + bias [O]; a row never depends on the others.

        `out` may be float32 where x and weight are bfloat16.
        """

    def quantized_matmul(
        self,
        x: torch.Tensor,
        weight: QuantizedWeight,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """As `matmul`, of a weight that is dequantised as it is read."""

    def rotary_store(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        slots: torch.Tensor,
        kv: KvLayer,
        num_heads: int,
    ) -> None:
        """Rotate q in place; rotate k and store it, and v.

        qkv [T, (N + 2M) * D]; positions int32 [T]; cos_sin float32 [P, D] (cos | sin halves); slots
        int32 [T], -1 where nothing is stored.
        """

    def decode_attention(
        self,
        q: torch.Tensor,
        kv: KvLayer,
        rows: AttentionRows,
        out: torch.Tensor,
        workspace: torch.Tensor,
        form: AttentionForm,
    ) -> None:
        """out [R, N, D]: query r is the last token of row r. q [R, N, D] may be strided.

        `workspace`: float32, at least `attention_workspace` elements.
        """

    def prefill_attention(
        self,
        q: torch.Tensor,
        kv: KvLayer,
        rows: AttentionRows,
        out: torch.Tensor,
        workspace: torch.Tensor,
        form: AttentionForm,
    ) -> None:
        """out [T, N, D]: row r's tokens, row_starts[r] on, are the last of its kv_lengths[r].

        q [T, N, D] may be strided.
        """

    def attention_workspace(
        self, num_rows: int, num_heads: int, head_dim: int, max_model_len: int
    ) -> int:
        """float32 elements that attention needs beside its arguments, for so many rows."""

    def gate(self, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        """out [T, F] = activation(gate) * up of gate_up [T, 2F] (gate | up)."""

    def soft_cap(self, logits: torch.Tensor, cap: float) -> None:
        """x = cap * tanh(x / cap), in place; float32."""

    def resolve_tokens(self, token_ids: torch.Tensor, previous: torch.Tensor) -> None:
        """Ids PREVIOUS_SAMPLE - i become previous[i], in place; int32. One of -1 becomes 0."""

    def sample(
        self, logits: torch.Tensor, columns: SampleColumns, vocabulary_size: int, out: torch.Tensor
    ) -> None:
        """Draw out int32 [S] from logits float32 [L, V], as docs/sampling.md has it.

        -1 where a row is -1, its logits are not finite, or nothing can be drawn.
        """

    def top_logprobs(
        self,
        logits: torch.Tensor,
        columns: SampleColumns,
        vocabulary_size: int,
        token_ids: torch.Tensor,
        out: TopLogprobs,
    ) -> None:
        """Logprobs by the model's own logits, of the samples that ask for them and have a token."""
