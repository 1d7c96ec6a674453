"""Puts a core together from the settings and what executor and tokenizers said."""

from typing import cast

from triptych.engine_core.admission import Limits, max_sequence_len
from triptych.engine_core.batch import Batch
from triptych.engine_core.layout import StepLayout
from triptych.engine_core.policy import policy_of
from triptych.engine_core.python_batch import PythonBatch
from triptych.engine_core.sampling import SamplingState
from triptych.engine_core.scheduler import Scheduler
from triptych.engine_core.suspects import Suspects
from triptych.services.scheduler.settings import SchedulerSettings
from triptych.v1 import stage_pb2


def longest_sequence(facts: stage_pb2.ModelFacts) -> int:
    """Longest prompt plus output, in tokens, that the model's context and the KV pool take."""
    return max_sequence_len(facts.max_model_len, facts.num_blocks, facts.block_size)


def build_core(
    settings: SchedulerSettings,
    facts: stage_pb2.ModelFacts,
    layout: StepLayout,
    sampleable_vocabulary: int,
    sampling: SamplingState,
    suspects: Suspects | None = None,
) -> Scheduler:
    """An empty scheduler for a model; `suspects`: of the one before. Raises ValueError naming what
    cannot work."""
    limits = Limits(
        max_model_len=facts.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_waiting=settings.max_num_waiting,
        vocabulary_size=facts.vocabulary_size,
        sampleable_vocabulary=sampleable_vocabulary,
        max_num_logits=settings.logits_rows,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        watermark_blocks=int(settings.watermark * facts.num_blocks),
        prefix_caching=settings.enable_prefix_caching,
    )
    batch = _new_batch(settings, facts, layout)
    return Scheduler(limits, batch, sampling, policy_of(settings.scheduling_policy), suspects)


def _new_batch(
    settings: SchedulerSettings, facts: stage_pb2.ModelFacts, layout: StepLayout
) -> Batch:
    caching, host_blocks = settings.enable_prefix_caching, facts.num_host_blocks
    if settings.engine_impl == "python":
        return PythonBatch(facts.num_blocks, facts.block_size, layout, caching, host_blocks)
    from triptych.kernels.core import Batch as NativeBatch

    # Its values are named tuples of its own, of the same shape: kernels do not know engine_core.
    native = NativeBatch(facts.num_blocks, facts.block_size, layout, caching, host_blocks)
    return cast(Batch, native)
