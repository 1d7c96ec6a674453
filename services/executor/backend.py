"""What a device must offer to run a model: the interface between the executor's loop and its maths.

To add a device (ROCm, Ascend): what fills `PipelinedBackend` (services/executor/device is the plan
of a GPU, written against a `Device`), and a case in `open_backend`. The loop owns sockets, rings
and slots; a backend owns weights, the KV cache and the forward pass, and knows nothing of requests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from triptych.services.executor.activation_precision import ActivationDtype
from triptych.services.executor.collectives import ALONE, Collectives
from triptych.services.executor.device_inputs import DeviceInputs
from triptych.services.executor.kv_budget import KvBudget, num_blocks_for
from triptych.services.executor.memory_nodes import MemoryNode
from triptych.services.executor.step_inputs import StepInputs
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import ModelFiles

Logits = npt.NDArray[np.float32]
KvCacheDtype = Literal["auto", "float32", "bfloat16", "int8", "fp8"]
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
    `quantization`: what matrices of float weights are rounded to as they load. Of a device:
    `rank` of `tensor_parallel_size`; bytes of host memory for blocks (`swap_space`); the share of
    its memory that weights, cache and graphs may take; whether its numbers must not depend on what
    else is computed (`deterministic`); the numbers of rows that graphs are captured for (None: the
    usual ones); the sequences and tokens of a step, that it makes room for.
    """

    device: Literal["cpu", "cuda", "emulated"] = "cpu"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    plan: Literal["auto", "eager", "native", "cudagraph"] = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_memory: int | None = None
    memory_utilization: float | None = None
    kv_cache_dtype: KvCacheDtype = "auto"
    activation_dtype: ActivationDtype = "auto"
    threads: int | None = None
    affinity: tuple[int, ...] = ()
    nodes: tuple[MemoryNode, ...] = ()
    quantization: Literal["none", "int8", "int4", "fp8"] = "none"
    isa: str | None = None
    weight_cache: Path | None = None
    rank: int = 0
    tensor_parallel_size: int = 1
    swap_space: int = 0
    gpu_memory_utilization: float = 0.9
    deterministic: bool = False
    capture_sizes: tuple[int, ...] | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512


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
    num_host_blocks: int = 0


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


@dataclass(frozen=True, slots=True)
class DrawnColumns:
    """What a device drew, in columns of the step's samples; as triptych.v1.DrawnTokens.

    token_ids int32 [S], -1 where none was drawn. The rest is of the samples that ask for logprobs
    and have a token, in order: logprobs float32 [Q], ranks int32 [Q], top_counts int32 [Q], and
    top_ids int32, top_logprobs float32 of their sum, most likely first.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]
    top_counts: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]


class LaunchedStep(Protocol):
    """A step that a device has been given."""

    def wait(self) -> DrawnColumns | None:
        """Until it is computed: what was drawn, None without samples. The logits that the host
        wanted are in place then. Any thread, once. Raises what went wrong on the device."""


@runtime_checkable
class PipelinedBackend(Backend, Protocol):
    """A device that draws tokens, and computes steps one after another as they are launched.

    `launch` and `wait` may be called by two threads; all else as `Backend`.
    """

    def register(self, step_ring: memoryview, logits_ring: memoryview) -> None:
        """The rings of a session, before its first step: a device may pin their pages."""

    def unregister(self) -> None:
        """The session is over: nothing may be in flight, and the rings are about to go."""

    def launch(self, inputs: StepInputs, device: DeviceInputs, logits: Logits) -> LaunchedStep:
        """Queue a step behind those before it; returns before it is computed.

        Ids PREVIOUS_SAMPLE - i are the tokens that the step launched before drew. The arrays are
        read until `wait` returns. Of `logits`, row i is written for each i of `device.host_logits`
        (for all rows, where `device` has no samples). Raises StepInputsError, with nothing queued,
        when the inputs are out of range.
        """


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a device can say at any time of what it did and took.

    `graph_bytes` of its memory are taken by `num_graphs` graphs; `peak_memory_bytes` is the most
    that was taken at once. `blocks_stored` went to host memory, `blocks_loaded` came from there.
    """

    num_graphs: int = 0
    graph_bytes: int = 0
    peak_memory_bytes: int = 0
    blocks_stored: int = 0
    blocks_loaded: int = 0


@runtime_checkable
class MeasuredBackend(Protocol):
    """A backend whose device can say more than its BackendFacts."""

    def device_facts(self) -> DeviceFacts:
        """As they are now. Any thread."""


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
    """Load a model into this machine's memory, to be opened beside others (a draft model); takes
    seconds. Raises StartupError when it cannot be run.

    `progress` hears (bytes read, bytes in all) as weights load.
    """
    refuse_misplaced(options)
    if options.device != "cpu":
        raise StartupError(f"speculative_model: for the CPU only, not for device {options.device}")
    from triptych.services.executor.cpu_backend import load_cpu_model

    return load_cpu_model(files, options, progress)


def blocks_within(options: BackendOptions, max_model_len: int, block_bytes: int) -> int:
    """Blocks of `block_bytes` bytes that the options pay for. Raises StartupError if none.

    To be asked when all weights are in place, so that a share of the available memory is of what
    is left.
    """
    budget = KvBudget(options.kv_cache_memory, options.memory_utilization)
    return num_blocks_for(block_bytes, options.block_size, max_model_len, budget)


def open_backend(
    files: ModelFiles,
    options: BackendOptions,
    progress: Progress = _no_progress,
    collectives: Collectives = ALONE,
) -> Backend:
    """Load a model and give it all the blocks that the options pay for. As `load_model`.

    `collectives` join the ranks of `options.tensor_parallel_size`.
    """
    if options.device != "cpu":
        refuse_misplaced(options)
        # Loads torch: only where it is used.
        from triptych.services.executor.device.backend import open_device_backend

        return open_device_backend(files, options, progress, collectives)
    model = load_model(files, options, progress)
    return model.open(blocks_within(options, model.max_model_len, model.block_bytes))


def refuse_misplaced(options: BackendOptions) -> None:
    """Raise StartupError for what only makes sense on another kind of device."""
    device = options.device
    if device == "cpu":
        misplaced = {
            "executor_plan cudagraph": options.plan == "cudagraph",
            f"tensor_parallel_size {options.tensor_parallel_size}": (
                options.tensor_parallel_size > 1
            ),
            "swap_space": options.swap_space > 0,
            "cudagraph_capture_sizes": options.capture_sizes is not None,
        }
    else:
        misplaced = {
            "executor_plan native": options.plan == "native",
            "memory_utilization (gpu_memory_utilization is meant)": (
                options.memory_utilization is not None
            ),
            f"cpu_isa {options.isa}": options.isa is not None,
            f"activation_dtype {options.activation_dtype}": options.activation_dtype != "auto",
        }
    for what, given in misplaced.items():
        if given:
            where = "a GPU" if device == "cpu" else "the CPU"
            raise StartupError(f"{what}: for {where} only, not for device {device}")
