"""The two batches, as tests take them."""

from collections.abc import Sequence
from typing import cast

from batch_model import BatchFactory
from triptych.engine_core.python_batch import PythonBatch
from triptych.kernels.core import Batch

# Its values are named tuples of its own, of the same shape: kernels do not know engine_core.
NATIVE_BATCH = cast(BatchFactory, Batch)
TWINS: Sequence[BatchFactory] = (PythonBatch, NATIVE_BATCH)
