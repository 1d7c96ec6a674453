"""What a device must offer to run a model: the interface between the executor's loop and its maths.

To add a device (CUDA, Ascend): a module with a function like `cpu_backend.load_cpu_model` that
returns something that fills `LoadedModel`, and a case in `load_model`. The loop owns sockets, rings
and slots; a backend owns weights, the KV cache and the forward pass, and knows nothing of requests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from triptych.services.executor.activation_precision import ActivationDtype
from triptych.services.executor.kv_budget import KvBudget, num_blocks_for
from triptych.services.executor.memory_nodes import MemoryNode
from triptych.services.executor.step_inputs import StepInputs
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import ModelFiles

Logits = npt.NDArray[np.float32]
KvCacheDtype = Literal["auto", "float32", "bfloat16", "int8"]
Progress = Callable[[int, int], None]
"""Hears (bytes read, bytes in all)."""


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """How to run a model; None leaves the choice to the backend.

    `memory_utilization` None and `kv_cache_memory` None: half of the available memory, at most
    1 GiB and 64 sequences of full length (see `kv_budget.num_blocks_for`). `threads` is the number
    of compute threads of this process, `affinity` the cores that they are pinned to in turn (empty:
    none), `nodes` the machine's memory nodes: with several, weights lie near the threads that are
    pinned to their cores. `isa` names a set of CPU kernels (None: the machine's best).
    `weight_cache` is the folder where packed weights are kept between starts (None: nowhere).
    `quantization`: what matrices of float weights are rounded to as they load.
    """

    device: Literal["cpu"] = "cpu"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    plan: Literal["auto", "eager", "native"] = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_memory: int | None = None
    memory_utilization: float | None = None
    kv_cache_dtype: KvCacheDtype = "auto"
    activation_dtype: ActivationDtype = "auto"
    threads: int | None = None
    affinity: tuple[int, ...] = ()
    nodes: tuple[MemoryNode, ...] = ()
    quantization: Literal["none", "int8", "int4"] = "none"
    isa: str | None = None
    weight_cache: Path | None = None


@dataclass(frozen=True, slots=True)
class BackendFacts:
    """What was opened, after every choice. `vocabulary_size` is the number of columns of logits."""

    device: str
    plan: str
    dtype: Literal["float32", "bfloat16"]
    architecture: str
    model: str
    parameters: int
    weight_bytes: int
    vocabulary_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    kv_cache_dtype: str = ""


class Backend(Protocol):
    """A model on a device. Used by one thread."""

    @property
    def facts(self) -> BackendFacts:
        """Constant from opening on."""

    def reserve(self, max_tokens: int) -> None:
        """Make room for steps of up to so many tokens, before the first of them.

        A larger step is computed too, but it first has to make room.
        """

    def execute(self, inputs: StepInputs, logits: Logits) -> None:
        """Run one step: store its tokens' keys and values, write the logits of rows that sample.

        Blocks are copied first (inputs.copy_sources). `logits` is float32 [max_logits,
        vocabulary_size], C-contiguous, the slot of the logits ring itself: row i receives the
        logits of token inputs.logits_tokens[i], other rows are left alone. Both arguments are only
        used during the call, which returns when the logits are in place. Numbers that are not
        finite are written as they are: the sampler reports them.

        Rows are independent: the numbers of a row come from its own tokens only.

        Raises StepInputsError when the inputs are out of range; the cache is then unchanged.
        """


class LoadedModel(Protocol):
    """A model whose weights are in place, without memory for keys and values."""

    @property
    def vocabulary_size(self) -> int:
        """Number of columns of its logits."""

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence that it will be given."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of `block_size` tokens in all layers."""

    def open(self, num_blocks: int) -> Backend:
        """Make room for so many blocks; once. Raises StartupError when there is none."""


def _no_progress(done: int, total: int) -> None:
    pass


def load_model(
    files: ModelFiles, options: BackendOptions, progress: Progress = _no_progress
) -> LoadedModel:
    """Load a model onto a device; takes seconds. Raises StartupError when it cannot be run.

    `progress` hears (bytes read, bytes in all) as weights load.
    """
    match options.device:
        case "cpu":
            from triptych.services.executor.cpu_backend import load_cpu_model

            return load_cpu_model(files, options, progress)
        case _:
            raise StartupError(f"device {options.device!r} is not supported (cpu is)")


def blocks_within(options: BackendOptions, max_model_len: int, block_bytes: int) -> int:
    """Blocks of `block_bytes` bytes that the options pay for. Raises StartupError if none.

    To be asked when all weights are in place, so that a share of the available memory is of what
    is left.
    """
    budget = KvBudget(options.kv_cache_memory, options.memory_utilization)
    return num_blocks_for(block_bytes, options.block_size, max_model_len, budget)


def open_backend(
    files: ModelFiles, options: BackendOptions, progress: Progress = _no_progress
) -> Backend:
    """Load a model and give it all the blocks that the options pay for. As `load_model`."""
    model = load_model(files, options, progress)
    return model.open(blocks_within(options, model.max_model_len, model.block_bytes))
