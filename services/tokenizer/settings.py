"""Settings of the tokenizer process."""

from typing import Self

from pydantic import Field, model_validator

from triptych.services.runtime.settings import Bytes, HeartbeatSettings, Names, flag


class TokenizerSettings(HeartbeatSettings):
    """What the tokenizer process is told. Keys that other processes share have one meaning."""

    model: str = Field(
        min_length=1,
        description="GGUF file, Hugging Face folder, or hub id (org/name)",
        json_schema_extra=flag("Model"),
    )
    served_model_name: Names = Field(
        default=(),
        description="names that clients may call the model by; the first is the one it reports",
        json_schema_extra=flag("Model", default="the file's or folder's name"),
    )
    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="address that the public gRPC port listens on; 0.0.0.0 for all",
        json_schema_extra=flag("Public endpoint"),
    )
    port: int = Field(
        default=50051,
        ge=0,
        le=65535,
        description="public gRPC port; 0 takes a free one",
        json_schema_extra=flag("Public endpoint"),
    )
    vllm_grpc: bool = Field(
        default=False,
        description="serve vllm.grpc.engine.VllmEngine on the gRPC port, for gateways that drive "
        "vLLM by it (needs the package smg-grpc-proto)",
        json_schema_extra=flag("Public endpoint"),
    )
    kserve_grpc: bool = Field(
        default=False,
        description="serve KServe's inference.GRPCInferenceService on the gRPC port",
        json_schema_extra=flag("Public endpoint"),
    )
    http: bool = Field(
        default=True,
        description="serve OpenAI-style HTTP beside gRPC",
        json_schema_extra=flag("Public endpoint"),
    )
    http_host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="address that the HTTP port listens on; 0.0.0.0 for all",
        json_schema_extra=flag("Public endpoint"),
    )
    http_port: int = Field(
        default=8000,
        ge=0,
        le=65535,
        description="HTTP port; 0 takes a free one",
        json_schema_extra=flag("Public endpoint"),
    )
    reuse_port: bool = Field(
        default=False,
        description="share both ports with other tokenizer processes (SO_REUSEPORT)",
        json_schema_extra=flag("Public endpoint"),
    )
    name: str = Field(
        default="tokenizer-0",
        pattern=r"^(tokenizer-[0-9]{1,3}|auto)$",
        description="name of this tokenizer process within its engine; auto: tokenizer-N with the"
        " lowest N that no live process has",
        json_schema_extra=flag("Process"),
    )
    tool_call_parser: str = Field(
        default="auto",
        pattern=r"^[a-z0-9_]{1,64}$",
        description="how the model writes tool calls: auto (as its chat template says), none, or a"
        " parser's name",
        json_schema_extra=flag("Chat"),
    )
    reasoning_parser: str = Field(
        default="auto",
        pattern=r"^[a-z0-9_]{1,64}$",
        description="how the model writes what it thinks: auto (as its chat template says), none,"
        " or a parser's name",
        json_schema_extra=flag("Chat"),
    )
    exclude_tools_when_tool_choice_none: bool = Field(
        default=False,
        description="do not show a request's tools to the model when its tool_choice is none",
        json_schema_extra=flag("Chat"),
    )
    max_streams: int = Field(
        default=1024,
        ge=1,
        le=1_000_000,
        description="requests that may be open at once; more are refused with RESOURCE_EXHAUSTED",
        json_schema_extra=flag("Limits", unit="requests"),
    )
    max_unread_tokens: int = Field(
        default=4096,
        ge=1,
        le=1 << 24,
        description="output that one stream may leave unread before it is ended",
        json_schema_extra=flag("Limits", unit="tokens"),
    )
    unread_timeout: float = Field(
        default=60.0,
        ge=0,
        le=86_400,
        description="a connection, or a gRPC call, whose client takes nothing for so long of what"
        " waits for it is ended; 0: never",
        json_schema_extra=flag("Limits", unit="seconds"),
    )
    max_logprobs: int = Field(
        default=20,
        ge=-1,
        le=1 << 20,
        description="alternatives that a request may ask for beside a token's own logprob; -1: all",
        json_schema_extra=flag("Limits", unit="tokens"),
    )
    max_message_bytes: Bytes = Field(
        default=16 << 20,
        ge=1024,
        le=1 << 30,
        description="largest gRPC message taken from a client",
        json_schema_extra=flag("Limits", unit="bytes", default="16MiB"),
    )
    http_max_body_bytes: Bytes = Field(
        default=16 << 20,
        ge=1024,
        le=1 << 30,
        description="largest body of an HTTP request; larger ones are refused with 413",
        json_schema_extra=flag("Limits", unit="bytes", default="16MiB"),
    )
    max_prompt_bytes: Bytes = Field(
        default=256 << 20,
        ge=1024,
        le=1 << 40,
        description="messages of all open requests together; more are refused with"
        " RESOURCE_EXHAUSTED",
        json_schema_extra=flag("Limits", unit="bytes", default="256MiB"),
    )
    structured_output_check_seconds: float = Field(
        default=5.0,
        gt=0,
        le=600,
        description="longest check of a request's structured output; what takes longer is refused",
        json_schema_extra=flag("Limits", unit="seconds"),
    )
    structured_output_check_memory: Bytes = Field(
        default=512 << 20,
        ge=16 << 20,
        le=1 << 40,
        description="memory that the check of a structured output may take; more is refused",
        json_schema_extra=flag("Limits", unit="bytes", default="512MiB"),
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=1 << 64,
        description="seed of requests that bring none",
        json_schema_extra=flag("Sampling", default="drawn at random per request"),
    )
    shutdown_grace: float = Field(
        default=10.0,
        ge=0,
        le=3600,
        description="time that running streams get to finish after SIGTERM",
        json_schema_extra=flag("Supervision", unit="seconds"),
    )

    recovery_timeout: float = Field(
        default=60.0,
        ge=0,
        le=86_400,
        description="time that requests wait for a stage that has died and is started again; then"
        " they end with UNAVAILABLE",
        json_schema_extra=flag("Supervision", unit="seconds"),
    )

    @model_validator(mode="after")
    def _largest_message_fits(self) -> Self:
        if self.max_prompt_bytes < self.max_message_bytes:
            raise ValueError(
                f"max_prompt_bytes: {self.max_prompt_bytes} must be at least max_message_bytes "
                f"({self.max_message_bytes})"
            )
        if self.http and self.max_prompt_bytes < self.http_max_body_bytes:
            raise ValueError(
                f"max_prompt_bytes: {self.max_prompt_bytes} must be at least http_max_body_bytes "
                f"({self.http_max_body_bytes})"
            )
        return self
