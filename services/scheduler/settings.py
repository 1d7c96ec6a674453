"""Settings of the scheduler process."""

from typing import Literal, Self

from pydantic import Field, model_validator

from triptych.services.runtime.settings import Bytes, StepSizeSettings, StepWatchSettings, flag


class SchedulingSettings(StepSizeSettings):
    """Who runs when: what a scheduler and a simulation of one are told alike."""

    max_num_waiting: int = Field(
        default=1024,
        ge=1,
        le=1_000_000,
        description="requests that may wait; more are refused with RESOURCE_EXHAUSTED",
        json_schema_extra=flag("Scheduling", unit="requests"),
    )
    long_prefill_token_threshold: int = Field(
        default=0,
        ge=0,
        le=1 << 20,
        description="tokens of one prompt in one step, so that others get their share; 0: no bound",
        json_schema_extra=flag("Scheduling", unit="tokens"),
    )
    scheduling_policy: Literal["fcfs", "priority", "shortest-prefill", "fair"] = Field(
        default="priority",
        description=(
            "who goes first: first come; lower `priority` (equal ones first come); short prompts; "
            "or the tenant that had least"
        ),
        json_schema_extra=flag("Scheduling"),
    )
    enable_prefix_caching: bool = Field(
        default=True,
        description="keep what prompts share in the KV cache, and compute it once",
        json_schema_extra=flag("Scheduling"),
    )
    watermark: float = Field(
        default=0.01,
        ge=0.0,
        lt=1.0,
        description="share of the KV blocks that a new sequence leaves to those that run",
        json_schema_extra=flag("Scheduling"),
    )
    queue_timeout: float = Field(
        default=0.0,
        ge=0.0,
        le=86_400.0,
        description="a request that has waited so long without running ends; 0: never",
        json_schema_extra=flag("Scheduling", unit="seconds"),
    )
    request_timeout: float = Field(
        default=0.0,
        ge=0.0,
        le=86_400.0,
        description="a request that has taken so long in all ends; 0: never",
        json_schema_extra=flag("Scheduling", unit="seconds"),
    )
    engine_impl: Literal["native", "python"] = Field(
        default="native",
        description="block pool, step assembly and sampler in C++, or their plain Python twins",
        json_schema_extra=flag("Scheduling"),
    )

    @model_validator(mode="after")
    def _budget_covers_sequences(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} must be at least "
                f"max_num_seqs ({self.max_num_seqs}), so that every sequence can take its token"
            )
        return self


class SchedulerSettings(SchedulingSettings, StepWatchSettings):
    """What the scheduler process is told. It learns the model's facts from its executor."""

    max_num_logits: int | None = Field(
        default=None,
        ge=1,
        le=1 << 20,
        description=(
            "rows of logits in one step: one for each sequence, the rest for prompt logprobs and "
            "guessed tokens (default: max_num_seqs + 32)"
        ),
        json_schema_extra=flag("Scheduling", unit="rows"),
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = Field(
        default="raw_logprobs",
        description="logprobs of the model's own logits, or of what the token was drawn from",
        json_schema_extra=flag("Scheduling"),
    )
    logits_processors: tuple[str, ...] = Field(
        default=(),
        description=(
            "plug-ins that requests may name: entry points of the group triptych.logits_processors"
        ),
        json_schema_extra=flag("Scheduling"),
    )
    num_slots: int = Field(
        default=2,
        ge=1,
        le=16,
        description="steps that the shared-memory rings hold",
        json_schema_extra=flag("Scheduling", unit="slots"),
    )
    async_scheduling: bool = Field(
        default=True,
        description="send a step while the one before it is computed, where the executor draws "
        "tokens (a GPU)",
        json_schema_extra=flag("Scheduling"),
    )
    structured_output_cache: int = Field(
        default=128,
        ge=0,
        le=65_536,
        description="compiled grammars that are kept when no request uses them",
        json_schema_extra=flag("Structured output", unit="grammars"),
    )
    structured_output_cache_bytes: Bytes = Field(
        default=16 << 20,
        ge=0,
        le=1 << 40,
        description="text of the grammars that are kept when no request uses them",
        json_schema_extra=flag("Structured output", default="16MiB"),
    )
    structured_output_timeout: float = Field(
        default=10.0,
        gt=0.0,
        le=3600.0,
        description="a request whose grammar takes so long to compile ends",
        json_schema_extra=flag("Structured output", unit="seconds"),
    )
    sampler_rows: int = Field(
        default=64,
        ge=0,
        le=4096,
        description=(
            "requests at once whose tokens programs on this machine draw themselves, each with a "
            "row of logits; 0: none"
        ),
        json_schema_extra=flag("Scheduling", unit="rows"),
    )
    sampler_timeout: float = Field(
        default=10.0,
        gt=0.0,
        le=3600.0,
        description="a request whose program takes so long for one token ends",
        json_schema_extra=flag("Scheduling", unit="seconds"),
    )
    speculative_method: Literal["off", "ngram", "suffix", "draft_model"] = Field(
        default="off",
        description=(
            "what guesses the next tokens, which are then computed together; outputs stay the "
            "same: ngram looks in the request's own text, suffix in earlier outputs too, "
            "draft_model asks the executor's second model"
        ),
        json_schema_extra=flag("Speculation"),
    )
    num_speculative_tokens: int = Field(
        default=7,
        ge=1,
        le=64,
        description="longest guess; each sequence's grows and shrinks with its success",
        json_schema_extra=flag("Speculation", unit="tokens"),
    )
    max_num_draft_tokens: int = Field(
        default=32,
        ge=1,
        le=1 << 20,
        description=(
            "guessed tokens in one step, all sequences together, each of which costs as much as "
            "another sequence; --max-num-logits bounds them too"
        ),
        json_schema_extra=flag("Speculation", unit="tokens"),
    )
    prompt_lookup_max: int = Field(
        default=4,
        ge=1,
        le=16,
        description="last tokens that are looked up (ngram, suffix): as many of them as are found",
        json_schema_extra=flag("Speculation", unit="tokens"),
    )
    prompt_lookup_min: int = Field(
        default=2,
        ge=1,
        le=16,
        description="fewest last tokens that must be found again; more guess less, and better",
        json_schema_extra=flag("Speculation", unit="tokens"),
    )

    @model_validator(mode="after")
    def _lookup_is_a_range(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min: {self.prompt_lookup_min} must be at most "
                f"prompt_lookup_max ({self.prompt_lookup_max})"
            )
        return self

    @model_validator(mode="after")
    def _an_idle_loop_does_not_hang(self) -> Self:
        """With nothing to do it turns once an interval."""
        if self.step_timeout <= self.heartbeat_interval:
            raise ValueError(
                f"step_timeout: {self.step_timeout:g} must be above heartbeat_interval "
                f"({self.heartbeat_interval:g})"
            )
        return self

    @model_validator(mode="after")
    def _logits_cover_sequences(self) -> Self:
        if self.max_num_logits is not None and self.max_num_logits < self.max_num_seqs:
            raise ValueError(
                f"max_num_logits: {self.max_num_logits} must be at least "
                f"max_num_seqs ({self.max_num_seqs}), so that every sequence can be sampled"
            )
        return self

    @property
    def logits_rows(self) -> int:
        """Rows of logits in one step."""
        return self.max_num_logits or self.max_num_seqs + 32
