"""What `triptych bench simulate` is told."""

from typing import Self

from pydantic import Field, model_validator

from triptych.services.runtime.settings import LogLevel, flag
from triptych.services.scheduler.settings import SchedulingSettings
from triptych.services.simulator.engine_shape import EngineShape
from triptych.services.simulator.generated_trace import TraceShape
from triptych.services.simulator.step_cost import PROFILES, ProfileName, StepCost

_GENERATED = "Generated trace (without --trace)"
_EXECUTOR = (
    "Modelled executor: a step takes step + token x tokens computed + kv-token x tokens read"
)
_KV = "KV cache"
_RUN = "Run"


class SimulateSettings(SchedulingSettings):
    """The scheduler's keys are the engine's own; the rest is what stands in for the engine."""

    trace: str | None = Field(
        default=None,
        min_length=1,
        description="JSON lines to replay instead of a generated trace",
        json_schema_extra=flag(_RUN, default="none: generated"),
    )
    save_trace: str | None = Field(
        default=None,
        min_length=1,
        description="file to write the generated trace to",
        json_schema_extra=flag(_RUN),
    )
    json_file: str | None = Field(
        default=None,
        min_length=1,
        description="file to write the figures to, with all tenants and priorities",
        json_schema_extra=flag(_RUN),
    )
    fairness_window: float = Field(
        default=60.0,
        gt=0,
        le=1e9,
        description="virtual time over which tenants' shares are compared",
        json_schema_extra=flag(_RUN, unit="seconds"),
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=(1 << 63) - 1,
        description="of everything that is drawn; the same seed gives the same figures",
        json_schema_extra=flag(_RUN),
    )
    requests: int = Field(
        default=10_000,
        ge=1,
        le=100_000_000,
        description="how many",
        json_schema_extra=flag(_GENERATED),
    )
    request_rate: float = Field(
        default=4.0,
        gt=0,
        le=1e6,
        description="Poisson arrivals",
        json_schema_extra=flag(_GENERATED, unit="requests per second"),
    )
    prompt_median: float = Field(
        default=128.0,
        ge=1,
        le=1 << 20,
        description="half of the prompts are shorter",
        json_schema_extra=flag(_GENERATED, unit="tokens"),
    )
    prompt_sigma: float = Field(
        default=0.8,
        ge=0,
        le=4,
        description="deviation of the logarithm of prompt lengths; 0: all equal",
        json_schema_extra=flag(_GENERATED),
    )
    output_median: float = Field(
        default=64.0,
        ge=1,
        le=1 << 20,
        description="half of the outputs are shorter",
        json_schema_extra=flag(_GENERATED, unit="tokens"),
    )
    output_sigma: float = Field(
        default=0.8,
        ge=0,
        le=4,
        description="deviation of the logarithm of output lengths; 0: all equal",
        json_schema_extra=flag(_GENERATED),
    )
    tenants: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="who send the requests",
        json_schema_extra=flag(_GENERATED),
    )
    tenant_skew: float = Field(
        default=0.0,
        ge=0,
        le=10,
        description="the k-th tenant sends in proportion to k to the power of minus this",
        json_schema_extra=flag(_GENERATED),
    )
    priorities: int = Field(
        default=1,
        ge=1,
        le=4,
        description="equally frequent priorities, 0 and up",
        json_schema_extra=flag(_GENERATED),
    )
    prefix_groups: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="groups of requests whose prompts begin alike",
        json_schema_extra=flag(_GENERATED),
    )
    prefix_tokens: int = Field(
        default=256,
        ge=1,
        le=1 << 20,
        description="tokens that a group has in common, before the prompt's own",
        json_schema_extra=flag(_GENERATED, unit="tokens"),
    )
    prefix_share: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="share of the requests that are in a group, if there are groups",
        json_schema_extra=flag(_GENERATED),
    )
    num_blocks: int = Field(
        default=4096,
        ge=1,
        le=1 << 24,
        description="blocks of the KV cache",
        json_schema_extra=flag(_KV, unit="blocks"),
    )
    block_size: int = Field(
        default=16,
        ge=1,
        le=1024,
        description="tokens in one KV block",
        json_schema_extra=flag(_KV, unit="tokens"),
    )
    max_model_len: int = Field(
        default=2048,
        ge=2,
        le=1 << 20,
        description="longest prompt plus output; generated lengths are cut to it",
        json_schema_extra=flag(_KV, unit="tokens"),
    )
    profile: ProfileName = Field(
        default="smollm2-135m-cpu",
        description="whose coefficients; the three below replace single ones",
        json_schema_extra=flag(_EXECUTOR),
    )
    step_us: float | None = Field(
        default=None,
        ge=0,
        le=1e9,
        description="of every step",
        json_schema_extra=flag(_EXECUTOR, unit="microseconds", default="the profile's"),
    )
    token_us: float | None = Field(
        default=None,
        ge=0,
        le=1e9,
        description="for each token computed",
        json_schema_extra=flag(_EXECUTOR, unit="microseconds", default="the profile's"),
    )
    kv_token_us: float | None = Field(
        default=None,
        ge=0,
        le=1e9,
        description="for each token of context read, once a sequence",
        json_schema_extra=flag(_EXECUTOR, unit="microseconds", default="the profile's"),
    )
    # Of no use here, but the engine's file and environment may have them.
    run_dir: str = Field(default="", json_schema_extra=flag(_RUN, hidden=True))
    log_level: LogLevel = Field(default="info", json_schema_extra=flag(_RUN, hidden=True))

    @model_validator(mode="after")
    def _saves_what_it_draws(self) -> Self:
        if self.trace is not None and self.save_trace is not None:
            raise ValueError("save_trace: only of a generated trace, not together with trace")
        return self

    @model_validator(mode="after")
    def _steps_take_time(self) -> Self:
        if not any(self.cost):
            raise ValueError("step_us: 0, with token_us and kv_token_us 0: steps must take time")
        return self

    @property
    def cost(self) -> StepCost:
        """Of a step of the modelled executor."""
        given = (self.step_us, self.token_us, self.kv_token_us)
        profile = PROFILES[self.profile]
        return StepCost(
            *(
                default if us is None else us * 1e-6
                for us, default in zip(given, profile, strict=True)
            )
        )

    @property
    def engine(self) -> EngineShape:
        """The engine. Raises ValueError naming what cannot work."""
        return EngineShape(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_waiting=self.max_num_waiting,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            scheduling_policy=self.scheduling_policy,
            enable_prefix_caching=self.enable_prefix_caching,
            watermark=self.watermark,
            queue_timeout=self.queue_timeout,
            request_timeout=self.request_timeout,
            engine_impl=self.engine_impl,
        )

    @property
    def shape(self) -> TraceShape:
        """The generated trace."""
        most = min(self.max_model_len, self.num_blocks * self.block_size)
        return TraceShape(
            num_requests=self.requests,
            request_rate=self.request_rate,
            max_len=most,
            prompt_median=self.prompt_median,
            prompt_sigma=self.prompt_sigma,
            output_median=self.output_median,
            output_sigma=self.output_sigma,
            num_tenants=self.tenants,
            tenant_skew=self.tenant_skew,
            num_priorities=self.priorities,
            prefix_groups=self.prefix_groups,
            prefix_tokens=self.prefix_tokens,
            prefix_share=self.prefix_share,
            seed=self.seed,
        )
