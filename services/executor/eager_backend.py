"""The eager plan as a Backend: weights and cache as torch tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from triptych.services.executor.backend import BackendFacts, BackendOptions, Logits
from triptych.services.executor.eager_plan import EagerPlan
from triptych.services.executor.kv_storage import KvStorage, block_bytes
from triptych.services.executor.model_config import ModelConfig
from triptych.services.executor.models import Network, build_network
from triptych.services.executor.rounding import Rounding, bits_of, check_rounding, round_rows
from triptych.services.executor.step_inputs import StepInputs
from triptych.services.executor.weights import Progress, open_weights
from triptych.services.runtime.model_files import ModelFiles

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ROWS = 512  # rounded at a time


def load_eager(files: ModelFiles, options: BackendOptions, progress: Progress) -> "EagerModel":
    """Load a model into memory. Raises StartupError when it cannot be run.

    Sets the process's number of compute threads when the options say one.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    source = open_weights(files)
    config = source.config
    max_model_len = config.context_within(options.max_model_len)
    dtype_name = "float32" if options.dtype == "auto" else options.dtype
    if options.kv_cache_dtype not in ("auto", dtype_name):
        raise config.refused(
            f"kv_cache_dtype {options.kv_cache_dtype} is not supported by the eager plan, whose "
            f"cache has the dtype of the model ({dtype_name})"
        )
    try:
        network = build_network(config, _DTYPES[dtype_name], source.rope_factors())
    except RuntimeError as error:  # torch's allocator
        raise config.refused("not enough memory for the weights") from error
    parameters = network.parameters()
    with torch.inference_mode():
        source.load(parameters, progress)
        if options.quantization in ("int8", "int4"):
            _round(parameters, config, options.quantization)
    return EagerModel(files.name, config, network, max_model_len, options.block_size, dtype_name)


@dataclass(frozen=True, slots=True)
class EagerModel:
    """As `LoadedModel`: a network with its weights."""

    name: str
    config: ModelConfig
    network: Network
    max_model_len: int
    block_size: int
    dtype: Literal["float32", "bfloat16"]

    @property
    def vocabulary_size(self) -> int:
        """As `LoadedModel.vocabulary_size`."""
        return self.config.vocabulary_size

    @property
    def block_bytes(self) -> int:
        """As `LoadedModel.block_bytes`."""
        return block_bytes(self.config, self.block_size, _DTYPES[self.dtype])

    def open(self, num_blocks: int) -> "EagerBackend":
        """As `LoadedModel.open`."""
        storage = KvStorage(self.config, num_blocks, self.block_size, _DTYPES[self.dtype])
        parameters = self.network.parameters().values()
        facts = BackendFacts(
            device="cpu",
            plan="eager",
            dtype=self.dtype,
            architecture=self.config.architecture,
            model=self.name,
            parameters=sum(each.numel() for each in parameters),
            weight_bytes=sum(each.nbytes for each in parameters),
            vocabulary_size=self.config.vocabulary_size,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_blocks=num_blocks,
            kv_cache_bytes=storage.num_bytes,
            kv_cache_dtype=self.dtype,
        )
        return EagerBackend(facts, EagerPlan(self.config, self.network, storage))


def _round(parameters: Mapping[str, torch.Tensor], config: ModelConfig, rounding: Rounding) -> None:
    """Give every matrix the values that the native plan's rounding gives it."""
    check_rounding(config, rounding)
    for name, weights in parameters.items():
        for start in range(0, len(weights) if weights.dim() == 2 else 0, _ROWS):
            part = weights[start : start + _ROWS]
            rounded = round_rows(name, part.float().numpy(), bits_of(name, rounding))
            part.copy_(torch.from_numpy(rounded.values()))


class EagerBackend:
    """A model computed by torch on this machine's CPU."""

    def __init__(self, facts: BackendFacts, plan: EagerPlan) -> None:
        self._facts = facts
        self._plan = plan

    @property
    def facts(self) -> BackendFacts:
        """As `Backend.facts`."""
        return self._facts

    def reserve(self, max_tokens: int) -> None:
        """As `Backend.reserve`: nothing, torch allocates as it goes."""

    def execute(self, inputs: StepInputs, logits: Logits) -> None:
        """As `Backend.execute`."""
        facts = self._facts
        inputs.check(
            vocabulary_size=facts.vocabulary_size,
            max_model_len=facts.max_model_len,
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
        )
        self._plan.run(inputs, logits)
