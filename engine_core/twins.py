"""The parts of the scheduler that exist twice, in plain Python and in C++, with one meaning.

engine_core never imports the C++ ones (`triptych.kernels.core.native_twins`): whoever builds a
Scheduler picks a pair and passes it in.
"""

from dataclasses import dataclass
from typing import Protocol

from triptych.engine_core.block_pool import BlockPool
from triptych.engine_core.kv_cache import KvBlocks, KvCache
from triptych.engine_core.layout import StepLayout
from triptych.engine_core.step_writer import PythonStepWriter, StepWriter


class Twins(Protocol):
    """A KV cache and a step writer over it, of one implementation."""

    @property
    def kv_cache(self) -> KvBlocks:
        """The block tables."""
        ...

    @property
    def step_writer(self) -> StepWriter:
        """The writer, reading those tables."""
        ...


@dataclass(frozen=True, slots=True)
class PythonTwins:
    """The plain pair."""

    kv_cache: KvCache
    step_writer: PythonStepWriter


def python_twins(num_blocks: int, block_size: int, layout: StepLayout) -> PythonTwins:
    """The plain pair, over a pool of its own."""
    kv_cache = KvCache(BlockPool(num_blocks), block_size)
    return PythonTwins(kv_cache, PythonStepWriter(kv_cache, layout))
