"""C++ twin of engine_core's hot half: the running sequences, their blocks, what a step computes.

It means what `engine_core.python_batch` means, call by call and byte by byte (a property test
drives both in lockstep). Neither imports the other: both fit engine_core.batch.Batch.
"""

from triptych.kernels.core._core import Batch
from triptych.kernels.core.values import Extent, Match, Outcome, ScheduledSequence, Score

__all__ = ["Batch", "Extent", "Match", "Outcome", "ScheduledSequence", "Score"]
