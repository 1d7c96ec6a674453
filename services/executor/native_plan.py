"""The native plan as a Backend: a step is one C++ call over packed weights, without torch.

The numbers are those of kernels/cpu/csrc: weights as they are on disk, activations as codes of 8 or
16 bits per block of 32 where the weights are quantised, all else float32.
"""

import logging
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from triptych.kernels.cpu import Plan, kv_block_bytes
from triptych.services.executor.activation_precision import activation_limits
from triptych.services.executor.backend import (
    BackendFacts,
    BackendOptions,
    KvCacheDtype,
    Logits,
    Progress,
)
from triptych.services.executor.model_config import ModelConfig
from triptych.services.executor.near_weights import near_memory
from triptych.services.executor.packed_weights import (
    Place,
    pack_weights,
    parts_of,
    places_of,
    plan_weights,
    total_bytes,
)
from triptych.services.executor.raw_weights import RawWeights
from triptych.services.executor.rope_frequencies import inverse_frequencies
from triptych.services.executor.step_inputs import StepInputs
from triptych.services.executor.weight_cache import packed_memory
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import ModelFiles

_LANES = 16

_log = logging.getLogger(__name__)


def why_not_native(config: ModelConfig, options: BackendOptions) -> str | None:
    """What the plan cannot express of a model or of the options; None when it can all of it."""
    if config.family != "llama" or config.rope is None:
        return f"models of family {config.family} are not among what it knows (llama)"
    if config.activation not in ("silu", "gelu_tanh"):
        return f"activation {config.activation} (silu, gelu_tanh are known)"
    if config.output_bias or config.mlp_bias:
        return "biases of the output projection or the MLP"
    if options.dtype == "bfloat16":
        return "dtype bfloat16 (it computes in float32)"
    if options.block_size % _LANES:
        return f"block_size {options.block_size} is not a multiple of {_LANES}"
    return None


def load_native(
    files: ModelFiles, source: RawWeights, options: BackendOptions, progress: Progress
) -> "NativeModel":
    """Pack a model's weights, or map them from the cache. Raises StartupError.

    For a model and options that `why_not_native` has nothing against.
    """
    config = source.config
    max_model_len = config.context_within(options.max_model_len)
    threads = options.threads or 1
    places = places_of(parts_of(config), source)
    near = near_memory(places, threads, options.affinity, options.nodes)
    started = time.monotonic()
    memory, cached = packed_memory(
        options.weight_cache,
        files,
        places,
        lambda to: pack_weights(places, source, to, threads, progress),
        near,
    )
    how = "mapped from the cache" if cached else "packed"
    _log.info("weights %s in %.2f s", how, time.monotonic() - started)
    if near is not None:
        _log.info("weights lie near their threads on %d memory nodes", len(near.nodes))
    return NativeModel(files.name, source, options, max_model_len, places, memory)


@dataclass(frozen=True, slots=True)
class NativeModel:
    """As `LoadedModel`: packed weights, and the open files that their vectors are read from."""

    name: str
    source: RawWeights
    options: BackendOptions
    max_model_len: int
    places: list[Place]
    memory: npt.NDArray[np.uint8]

    @property
    def vocabulary_size(self) -> int:
        """As `LoadedModel.vocabulary_size`."""
        return self.source.config.vocabulary_size

    @property
    def kv_dtype(self) -> KvCacheDtype:
        """What keys and values are stored as."""
        asked = self.options.kv_cache_dtype
        return "bfloat16" if asked == "auto" else asked

    @property
    def block_bytes(self) -> int:
        """As `LoadedModel.block_bytes`."""
        config = self.source.config
        return kv_block_bytes(
            config.num_layers,
            self.options.block_size,
            config.num_kv_heads,
            config.head_dim,
            self.kv_dtype,
        )

    def open(self, num_blocks: int) -> "NativeBackend":
        """As `LoadedModel.open`."""
        facts = BackendFacts(
            device="cpu",
            plan="native",
            dtype="float32",
            architecture=self.source.config.architecture,
            model=self.name,
            parameters=_parameters(self.places),
            weight_bytes=total_bytes(self.places),
            vocabulary_size=self.vocabulary_size,
            max_model_len=self.max_model_len,
            block_size=self.options.block_size,
            num_blocks=num_blocks,
            kv_cache_bytes=num_blocks * self.block_bytes,
            kv_cache_dtype=self.kv_dtype,
        )
        weights = plan_weights(self.places, self.memory)
        options = self.options
        try:
            plan = Plan(self._shape(num_blocks), weights, options.threads or 1, options.affinity)
        except MemoryError as error:
            raise StartupError(
                f"the KV cache of {facts.kv_cache_bytes} bytes cannot be allocated; use a smaller "
                f"--kv-cache-memory"
            ) from error
        except ValueError as error:
            raise StartupError(str(error)) from error
        return NativeBackend(facts, plan)

    def _shape(self, num_blocks: int) -> dict[str, object]:
        config = self.source.config
        assert config.rope is not None
        factors = self.source.rope_factors()
        return {
            "vocabulary_size": config.vocabulary_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_layers": config.num_layers,
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "norm_epsilon": config.norm_epsilon,
            "activation": config.activation,
            "sliding_window": config.sliding_window,
            "attention_soft_cap": config.attention_soft_cap,
            "logits_soft_cap": config.logits_soft_cap,
            "frequencies": inverse_frequencies(config.rope, config.head_dim, factors).tolist(),
            "max_model_len": self.max_model_len,
            "block_size": self.options.block_size,
            "num_blocks": num_blocks,
            "kv_dtype": self.kv_dtype,
            "activation_limits": activation_limits(self.options.activation_dtype),
        }


class NativeBackend:
    """A model computed by our own kernels on this machine's CPU."""

    def __init__(self, facts: BackendFacts, plan: Plan) -> None:
        self._facts = facts
        self._plan = plan

    @property
    def facts(self) -> BackendFacts:
        """As `Backend.facts`."""
        return self._facts

    @property
    def plan(self) -> Plan:
        """The plan itself, for benchmarks."""
        return self._plan

    def reserve(self, max_tokens: int) -> None:
        """As `Backend.reserve`. Pins the calling thread, which is to be the one that executes."""
        self._plan.reserve(max_tokens)
        self._plan.pin_caller()

    def execute(self, inputs: StepInputs, logits: Logits) -> None:
        """As `Backend.execute`. One native call; nothing is allocated below it."""
        facts = self._facts
        inputs.check_room(len(logits))
        inputs.check(
            vocabulary_size=facts.vocabulary_size,
            max_model_len=facts.max_model_len,
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
        )
        self._plan.step(
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            inputs.row_starts,
            inputs.kv_lengths,
            inputs.block_tables,
            inputs.logits_tokens,
            inputs.copy_sources,
            inputs.copy_targets,
            logits,
        )


def _parameters(places: list[Place]) -> int:
    return sum(int(np.prod(place.part.shape, dtype=np.int64)) for place in places)
