"""Settings of the executor process."""

from typing import Literal, Self

from pydantic import Field, model_validator

from triptych.services.runtime.settings import (
    Bytes,
    StepSizeSettings,
    StepWatchSettings,
    default_weight_cache,
    flag,
)


class ExecutorSettings(StepSizeSettings, StepWatchSettings):
    """What the executor process is told."""

    model: str = Field(
        min_length=1,
        description="GGUF file, Hugging Face folder, or hub id (org/name)",
        json_schema_extra=flag("Model"),
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="type to compute in; auto is float32 on the CPU",
        json_schema_extra=flag("Model"),
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        le=1 << 24,
        description="longest prompt plus output",
        json_schema_extra=flag("Model", unit="tokens", default="the model's own context length"),
    )
    block_size: int = Field(
        default=16,
        ge=1,
        le=1024,
        description="tokens in one KV block",
        json_schema_extra=flag("Memory", unit="tokens"),
    )
    kv_cache_memory: Bytes | None = Field(
        default=None,
        ge=1,
        le=1 << 50,
        description="memory for the KV cache; wins over --memory-utilization",
        json_schema_extra=flag("Memory", unit="bytes", default="from --memory-utilization"),
    )
    memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of the available memory that the KV cache may take",
        json_schema_extra=flag("Memory", default="0.5, but at most 1 GiB"),
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="share of a GPU's memory that weights, KV cache, graphs and steps may take",
        json_schema_extra=flag("Memory"),
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8", "fp8"] = Field(
        default="auto",
        description="type of the KV cache; auto is bfloat16 in the native plan, dtype elsewhere; "
        "fp8 on a GPU only",
        json_schema_extra=flag("Memory"),
    )
    quantization: Literal["none", "int8", "int4", "fp8"] = Field(
        default="none",
        description="what float weights of a folder are rounded to as they load, in groups of 32 "
        "(fp8, on a GPU only: a scale for each output)",
        json_schema_extra=flag("Model"),
    )
    weight_cache: str = Field(
        default_factory=default_weight_cache,
        min_length=1,
        description="folder where packed weights wait for the next start; off keeps none",
        json_schema_extra=flag("Memory", default="$XDG_CACHE_HOME/triptych or ~/.cache/triptych"),
    )
    executor_plan: Literal["auto", "eager", "native", "cudagraph"] = Field(
        default="auto",
        description="how a step is computed; auto takes native on the CPU where it can express the "
        "model, cudagraph on a GPU",
        json_schema_extra=flag("Execution"),
    )
    enforce_eager: bool = Field(
        default=False,
        description="compute with the eager reference plan, whatever --executor-plan says",
        json_schema_extra=flag("Execution"),
    )
    device: Literal["cpu", "cuda", "emulated"] = Field(
        default="cpu",
        description="where to compute; emulated is what a GPU does, on the CPU: for tests, slow",
        json_schema_extra=flag("Execution"),
    )
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        le=64,
        description="executors that compute every step together, a rank and a device each",
        json_schema_extra=flag("Execution", unit="ranks"),
    )
    deterministic: bool = Field(
        default=False,
        description="on a GPU: kernels whose numbers do not depend on what else is in the batch; "
        "always so on the CPU",
        json_schema_extra=flag("Execution"),
    )
    cudagraph_capture_sizes: str | None = Field(
        default=None,
        pattern=r"^[1-9]\d{0,4}(,[1-9]\d{0,4})*$",
        description="numbers of sequences that CUDA graphs are captured for, like 1,2,4,8",
        json_schema_extra=flag("Execution", default="1,2,4, by 8 to 256, by 16 to 512"),
    )
    swap_space: Bytes = Field(
        default=0,
        ge=0,
        le=1 << 50,
        description="on a GPU: host memory for KV blocks that the GPU's has no room for",
        json_schema_extra=flag("Memory", unit="bytes"),
    )
    cpu_threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="compute threads",
        json_schema_extra=flag("Execution", unit="threads", default="one per core"),
    )
    cpu_affinity: str = Field(
        default="auto",
        pattern=r"^(auto|none|\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*)$",
        description="cores to pin compute threads to, like 0-3,8; auto pins when there is a "
        "thread for every core that may be used",
        json_schema_extra=flag("Execution"),
    )
    cpu_isa: Literal["auto", "avx512vnni", "avx512", "avx2", "scalar"] = Field(
        default="auto",
        description="instruction set of the CPU kernels; auto takes the machine's best",
        json_schema_extra=flag("Execution"),
    )
    activation_dtype: Literal["auto", "int16", "int8"] = Field(
        default="auto",
        description="type that activations are rounded to where weights are quantised; auto is "
        "int8 or int16 by what a matrix is for",
        json_schema_extra=flag("Execution"),
    )
    speculative_model: str | None = Field(
        default=None,
        min_length=1,
        description="draft model that guesses tokens ahead, in the same process: GGUF file, "
        "Hugging Face folder, or hub id; of the same vocabulary",
        json_schema_extra=flag("Speculation", default="none"),
    )
    rank: int = Field(
        default=0,
        ge=0,
        le=63,
        description="which of the engine's executors this is",
        json_schema_extra=flag("Execution", hidden=True),
    )

    @model_validator(mode="after")
    def _context_holds_a_block(self) -> Self:
        if self.max_model_len is not None and self.block_size > self.max_model_len:
            raise ValueError(
                f"block_size: {self.block_size} must be at most max_model_len "
                f"({self.max_model_len})"
            )
        return self

    @model_validator(mode="after")
    def _rank_is_one_of_them(self) -> Self:
        if self.rank >= self.tensor_parallel_size:
            raise ValueError(
                f"rank: {self.rank} must be below tensor_parallel_size "
                f"({self.tensor_parallel_size})"
            )
        return self

    @model_validator(mode="after")
    def _ranks_have_devices(self) -> Self:
        if self.tensor_parallel_size > 1 and self.device == "cpu":
            raise ValueError(
                f"tensor_parallel_size: {self.tensor_parallel_size} ranks need --device cuda (or "
                "--device emulated, to try them without GPUs); on the CPU one process has all cores"
            )
        return self

    @property
    def capture_sizes(self) -> tuple[int, ...] | None:
        """cudagraph_capture_sizes as numbers."""
        sizes = self.cudagraph_capture_sizes
        return None if sizes is None else tuple(map(int, sizes.split(",")))
