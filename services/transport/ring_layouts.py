"""The rings' shapes, computed alike on both ends from the facts that the handshake exchanged."""

from triptych.engine_core.layout import LogitsLayout, StepLayout
from triptych.v1 import stage_pb2


def step_layout(facts: stage_pb2.ModelFacts, welcome: stage_pb2.ExecutorWelcome) -> StepLayout:
    """The step ring between a scheduler with these settings and an executor with these facts.

    Independent of num_blocks, so that an executor that comes back with a smaller pool still fits.
    """
    return StepLayout(
        num_slots=welcome.num_slots,
        max_tokens=welcome.max_num_batched_tokens,
        max_rows=welcome.max_num_seqs,
        max_blocks_per_row=-(-facts.max_model_len // facts.block_size),
        max_logits=welcome.max_logits,
        max_samples=welcome.max_samples,
        max_history=welcome.max_history,
        max_transfers=welcome.max_transfers,
    )


def logits_layout(
    facts: stage_pb2.ModelFacts, welcome: stage_pb2.ExecutorWelcome, rank: int = 0
) -> LogitsLayout:
    """The logits ring between the same two. Only rank 0 has logits; another one's ring is as small
    as a ring can be."""
    if rank > 0:
        return LogitsLayout(num_slots=1, max_logits=1, vocabulary_size=1)
    return LogitsLayout(
        num_slots=welcome.num_slots,
        max_logits=welcome.max_logits,
        vocabulary_size=facts.vocabulary_size,
    )
