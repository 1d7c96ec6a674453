"""The CPU as a Backend: weights in ordinary memory, the eager plan."""

import torch

from triptych.services.executor.backend import BackendFacts, BackendOptions, Logits
from triptych.services.executor.eager_plan import EagerPlan
from triptych.services.executor.kv_storage import KvBudget, KvStorage, num_blocks_for
from triptych.services.executor.model_config import ModelConfig
from triptych.services.executor.models import build_network
from triptych.services.executor.step_inputs import StepInputs
from triptych.services.executor.weights import Progress, open_weights
from triptych.services.runtime.model_files import ModelFiles


def open_cpu_backend(
    files: ModelFiles, options: BackendOptions, progress: Progress
) -> "CpuBackend":
    """Load a model into memory. Raises StartupError when it cannot be run.

    Sets the process's number of compute threads when the options say one.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    source = open_weights(files)
    config = source.config
    max_model_len = _max_model_len(config, options.max_model_len)
    dtype_name = "float32" if options.dtype == "auto" else options.dtype
    dtype = torch.float32 if dtype_name == "float32" else torch.bfloat16
    budget = KvBudget(options.kv_cache_memory, options.memory_utilization)
    try:
        network = build_network(config, dtype, source.rope_factors())
    except RuntimeError as error:  # torch's allocator
        raise config.refused("not enough memory for the weights") from error
    parameters = network.parameters()
    with torch.inference_mode():
        source.load(parameters, progress)
    # After the weights are in place, so that a share of the available memory is what is left.
    num_blocks = num_blocks_for(config, options.block_size, dtype, max_model_len, budget)
    storage = KvStorage(config, num_blocks, options.block_size, dtype)
    facts = BackendFacts(
        device="cpu",
        plan="eager",
        dtype=dtype_name,
        architecture=config.architecture,
        model=files.name,
        parameters=sum(each.numel() for each in parameters.values()),
        weight_bytes=sum(each.nbytes for each in parameters.values()),
        vocabulary_size=config.vocabulary_size,
        max_model_len=max_model_len,
        block_size=options.block_size,
        num_blocks=num_blocks,
        kv_cache_bytes=storage.num_bytes,
    )
    return CpuBackend(facts, EagerPlan(config, network, storage))


class CpuBackend:
    """A model on this machine's CPU."""

    def __init__(self, facts: BackendFacts, plan: EagerPlan) -> None:
        self._facts = facts
        self._plan = plan

    @property
    def facts(self) -> BackendFacts:
        """As `Backend.facts`."""
        return self._facts

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


def _max_model_len(config: ModelConfig, asked: int | None) -> int:
    if asked is None:
        return config.max_position
    if not 1 <= asked <= config.max_position:
        raise config.refused(
            f"max_model_len {asked} is not within 1 and the model's context of "
            f"{config.max_position} tokens"
        )
    return asked
