"""The order among sequences, as a sort key: first in, and (from the end) first out when room lacks.

A key never changes during a sequence's life and no two are equal, so a preempted sequence returns
to its old place among the waiting.
"""

from triptych.engine_core.ids import SequenceId
from triptych.engine_core.sequence import Sequence


def by_priority(sequence: Sequence) -> tuple[int, SequenceId]:
    """Lower priority numbers first; first come, first served among equals."""
    return sequence.request.priority, sequence.sequence_id
