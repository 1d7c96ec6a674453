"""Settings of the scheduler process."""

from typing import Literal, Self

from pydantic import Field, model_validator

from triptych.services.runtime.settings import HeartbeatSettings, flag


class SchedulerSettings(HeartbeatSettings):
    """What the scheduler process is told. It learns the model's facts from its executor."""

    max_num_seqs: int = Field(
        default=64,
        ge=1,
        le=4096,
        description="sequences in one step",
        json_schema_extra=flag("Scheduling", unit="sequences"),
    )
    max_num_batched_tokens: int = Field(
        default=512,
        ge=1,
        le=1 << 20,
        description="tokens computed in one step; longer prompts are prefilled in chunks",
        json_schema_extra=flag("Scheduling", unit="tokens"),
    )
    max_num_waiting: int = Field(
        default=1024,
        ge=1,
        le=1_000_000,
        description="requests that may wait; more are refused with RESOURCE_EXHAUSTED",
        json_schema_extra=flag("Scheduling", unit="requests"),
    )
    engine_impl: Literal["native", "python"] = Field(
        default="native",
        description="block pool, step assembly and sampler in C++, or their plain Python twins",
        json_schema_extra=flag("Scheduling"),
    )
    num_slots: int = Field(
        default=2,
        ge=1,
        le=16,
        description="steps that the shared-memory rings hold",
        json_schema_extra=flag("Scheduling", unit="slots"),
    )

    @model_validator(mode="after")
    def _budget_covers_sequences(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} must be at least "
                f"max_num_seqs ({self.max_num_seqs}), so that every sequence can take its token"
            )
        return self
