"""Puts a core together from the settings and what executor and tokenizers said."""

from typing import Literal

from triptych.engine_core.admission import Limits, max_sequence_len
from triptych.engine_core.layout import StepLayout
from triptych.engine_core.scheduler import Scheduler
from triptych.engine_core.twins import Twins, python_twins
from triptych.services.scheduler.settings import SchedulerSettings
from triptych.v1 import stage_pb2

Impl = Literal["native", "python"]


def longest_sequence(facts: stage_pb2.ModelFacts) -> int:
    """Longest prompt plus output, in tokens, that the model's context and the KV pool take."""
    return max_sequence_len(facts.max_model_len, facts.num_blocks, facts.block_size)


def build_core(
    settings: SchedulerSettings,
    facts: stage_pb2.ModelFacts,
    layout: StepLayout,
    sampleable_vocabulary: int,
) -> Scheduler:
    """An empty scheduler for a model. Raises ValueError naming what cannot work."""
    limits = Limits(
        max_model_len=facts.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_waiting=settings.max_num_waiting,
        vocabulary_size=facts.vocabulary_size,
        sampleable_vocabulary=sampleable_vocabulary,
    )
    twins = _twins(settings.engine_impl, facts, layout)
    return Scheduler(limits, twins.kv_cache, twins.step_writer)


def _twins(impl: Impl, facts: stage_pb2.ModelFacts, layout: StepLayout) -> Twins:
    if impl == "python":
        return python_twins(facts.num_blocks, facts.block_size, layout)
    from triptych.kernels.core import native_twins

    return native_twins(facts.num_blocks, facts.block_size, layout)
