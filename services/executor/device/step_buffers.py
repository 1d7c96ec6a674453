"""What a step computes into: activations, drawn tokens, logprobs. Allocated once."""

from dataclasses import dataclass

import torch

from triptych.engine_core.layout import MAX_SAMPLE_LOGPROBS
from triptych.services.executor.device.capacity import StepCapacity
from triptych.services.executor.device.device import Device
from triptych.services.executor.device.network import Activations, NetworkForm
from triptych.services.executor.device.ops import Ops, TopLogprobs
from triptych.services.executor.device.shard import Shard
from triptych.services.executor.model_config import ModelConfig

_COLUMNS = 3 + 2 * MAX_SAMPLE_LOGPROBS


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """`previous` int32 [samples]: what the last step drew, which the next refers to.

    `scores` int32 [samples * (3 + 2k)]: logprobs of S samples are packed at its start, k a number
    of the layout, so that they are one copy to the host: see `top_logprobs`.
    """

    activations: Activations
    previous: torch.Tensor
    scores: torch.Tensor

    def top_logprobs(self, num_samples: int) -> TopLogprobs:
        """Views of `scores`, for so many samples."""
        return score_views(self.scores, num_samples)


def score_views(scores: torch.Tensor, num_samples: int) -> TopLogprobs:
    """int32 [>= num_samples * (3 + 2k)] as logprobs, ranks, counts, top ids, top logprobs."""
    most = num_samples * MAX_SAMPLE_LOGPROBS
    sizes = (num_samples, num_samples, num_samples, most, most)
    parts = scores[: sum(sizes)].split(sizes)
    return TopLogprobs(
        logprobs=parts[0].view(torch.float32),
        ranks=parts[1],
        top_counts=parts[2],
        top_ids=parts[3].view(num_samples, MAX_SAMPLE_LOGPROBS),
        top_logprobs=parts[4].view(torch.float32).view(num_samples, MAX_SAMPLE_LOGPROBS),
    )


def score_count(num_samples: int) -> int:
    """int32 elements of the scores of so many samples."""
    return num_samples * _COLUMNS


@dataclass(frozen=True, slots=True)
class BufferShape:
    """What sizes depend on beside the step's."""

    config: ModelConfig
    form: NetworkForm
    dtype: torch.dtype
    max_model_len: int
    shard: Shard


def step_buffers(
    device: Device, ops: Ops, shape: BufferShape, capacity: StepCapacity
) -> StepBuffers:
    """Allocate for steps of a capacity. Raises DeviceMemoryError."""
    config, form, dtype = shape.config, shape.form, shape.dtype
    tokens, rows, hidden = capacity.tokens, capacity.logits, config.hidden_size
    vocabulary = config.vocabulary_size
    part = device.empty((rows, -(-vocabulary // shape.shard.size)), torch.float32)
    logits: torch.Tensor | None = None
    if shape.shard.size == 1:
        logits = part
    elif shape.shard.rank == 0:
        logits = device.empty((rows, vocabulary), torch.float32)
    heads = form.num_heads + 2 * form.num_kv_heads
    workspace = ops.attention_workspace(
        capacity.rows, form.num_heads, form.head_dim, shape.max_model_len
    )
    activations = Activations(
        residual=device.empty((tokens, hidden), dtype),
        branch=device.empty((tokens, hidden), dtype),
        normed=device.empty((tokens, hidden), dtype),
        qkv=device.empty((tokens, heads * form.head_dim), dtype),
        mixed=device.empty((tokens, form.num_heads * form.head_dim), dtype),
        gate_up=device.empty((tokens, 2 * form.intermediate_size), dtype),
        gated=device.empty((tokens, form.intermediate_size), dtype),
        wanted_residual=device.empty((rows, hidden), dtype),
        wanted_branch=device.empty((rows, hidden), dtype),
        wanted_normed=device.empty((rows, hidden), dtype),
        logits_part=part,
        logits=logits,
        workspace=device.empty((workspace,), torch.float32),
    )
    return StepBuffers(
        activations,
        device.zeros((capacity.samples,), torch.int32),
        device.empty((score_count(capacity.samples),), torch.int32),
    )
