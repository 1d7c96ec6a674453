"""The operations of a step by the kernels of kernels/triton: what a GPU computes with.

Launchers write where they are told and wait for nothing. A row never depends on the others: with
`deterministic` unset, products of many rows are left to the vendor's library instead, which is
faster, and does not promise that.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the name that all torch code uses

from triptych.kernels.reference.quantized_weights import QuantizedWeight
from triptych.kernels.triton.embedding import embed
from triptych.kernels.triton.matmul import matmul
from triptych.kernels.triton.paged_attention import (
    decode_attention,
    decode_workspace,
    prefill_attention,
)
from triptych.kernels.triton.quantized_matmul import quantized_matmul
from triptych.kernels.triton.rms_norm import add_rms_norm
from triptych.kernels.triton.rotary_store import rotary_store
from triptych.kernels.triton.sampler import (
    Features,
    SamplerWorkspace,
    sample,
    sampler_workspace,
)
from triptych.kernels.triton.silu_gate import gelu_tanh_gate, silu_gate
from triptych.kernels.triton.tiles import matmul_workspace
from triptych.kernels.triton.token_sources import resolve_tokens
from triptych.kernels.triton.top_logprobs import (
    LogprobsWorkspace,
    logprobs_workspace,
    top_logprobs,
)
from triptych.services.executor.device.device import Device
from triptych.services.executor.device.emulated_trace import kernel
from triptych.services.executor.device.ops import (
    AttentionForm,
    AttentionRows,
    KvLayer,
    SampleColumns,
    TopLogprobs,
)
from triptych.services.executor.model_config import Activation

_MANY_ROWS = 256
"""From here on a product is bound by arithmetic, where libraries are ahead."""


class TritonOps:
    """As `Ops`, for one device and one stream: its workspaces are shared by all launches."""

    def __init__(self, device: Device, *, deterministic: bool) -> None:
        self._device = device.torch_device
        self._deterministic = deterministic
        self._products = matmul_workspace(self._device)
        self._draws: SamplerWorkspace | None = None
        self._scores: LogprobsWorkspace | None = None
        self._scored = (0, 0)  # samples and ids that _scores has room for

    @kernel
    def embed(
        self, token_ids: torch.Tensor, table: torch.Tensor, first: int, out: torch.Tensor
    ) -> None:
        """As `Ops.embed`."""
        embed(token_ids, table, first, out)

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
        add_rms_norm(x, residual, weight, epsilon, out)

    @kernel
    def matmul(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """As `Ops.matmul`."""
        if self._deterministic or len(x) < _MANY_ROWS or out.dtype != x.dtype:
            matmul(x, weight, out, bias, self._products)
        elif bias is None:
            torch.mm(x, weight.T, out=out)
        else:
            torch.addmm(bias, x, weight.T, out=out)

    @kernel
    def quantized_matmul(
        self,
        x: torch.Tensor,
        weight: QuantizedWeight,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """As `Ops.quantized_matmul`."""
        quantized_matmul(x, weight, out, bias, self._products)

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
        rotary_store(
            qkv, positions, cos_sin, slots, kv.keys, kv.values,
            num_heads, kv.scales,
        )  # fmt: skip

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
        decode_attention(
            q, kv.keys, kv.values, rows.block_tables, rows.kv_lengths, out, workspace,
            form.scale, form.window, form.soft_cap, kv.scales,
        )  # fmt: skip

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
        prefill_attention(
            q, kv.keys, kv.values, rows.row_starts, rows.kv_lengths, rows.block_tables, out,
            form.scale, form.window, form.soft_cap, kv.scales, workspace,
        )  # fmt: skip

    def attention_workspace(
        self, num_rows: int, num_heads: int, head_dim: int, max_model_len: int
    ) -> int:
        """As `Ops.attention_workspace`."""
        return decode_workspace(num_rows, num_heads, head_dim, max_model_len)

    @kernel
    def gate(self, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        """As `Ops.gate`."""
        match activation:
            case "silu":
                silu_gate(gate_up, out)
            case "gelu_tanh":
                gelu_tanh_gate(gate_up, out)
            case "gelu" | "relu":
                gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
                out.copy_((F.gelu(gate) if activation == "gelu" else F.relu(gate)) * up)

    @kernel
    def soft_cap(self, logits: torch.Tensor, cap: float) -> None:
        """As `Ops.soft_cap`."""
        logits.div_(cap).tanh_().mul_(cap)

    @kernel
    def resolve_tokens(self, token_ids: torch.Tensor, previous: torch.Tensor) -> None:
        """As `Ops.resolve_tokens`."""
        resolve_tokens(token_ids, previous)

    @kernel
    def sample(
        self, logits: torch.Tensor, columns: SampleColumns, vocabulary_size: int, out: torch.Tensor
    ) -> None:
        """As `Ops.sample`. Takes memory where there are more samples, or ids, than ever before."""
        count, room = len(columns.rows), self._draws
        if room is None or room.vocabulary != vocabulary_size or len(room.peaks) < count:
            # The largest step is tried when a device is opened: room for as many samples stays.
            most = count if room is None else max(count, len(room.peaks))
            self._draws = room = None  # both do not fit
            room = self._draws = sampler_workspace(most, vocabulary_size, self._device)
        asked = columns.features
        features = Features(asked.noise, asked.top_k, asked.top_p, asked.penalties)
        sample(logits, columns, vocabulary_size, out, room, features)

    @kernel
    def top_logprobs(
        self,
        logits: torch.Tensor,
        columns: SampleColumns,
        vocabulary_size: int,
        token_ids: torch.Tensor,
        out: TopLogprobs,
    ) -> None:
        """As `Ops.top_logprobs`. Takes memory as `sample` does."""
        count, (samples, ids) = len(columns.rows), self._scored
        if self._scores is None or samples < count or ids < vocabulary_size:
            self._scores = None
            self._scored = count, vocabulary_size
            top = out.top_ids.shape[1]
            self._scores = logprobs_workspace(count, vocabulary_size, top, self._device)
        top_logprobs(logits, columns, vocabulary_size, token_ids, out, self._scores)
