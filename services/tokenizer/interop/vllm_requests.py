"""vllm.grpc.engine.GenerateRequest -> triptych.v1.GenerateRequest.

What the contract has and this engine has not is refused by name, never dropped. Scalars without
presence are read as vLLM's own servicer reads them: 0 is "not set" where 0 has no meaning.
"""

from smg_grpc_proto.generated import vllm_engine_pb2

from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.validation import MAX_REQUEST_ID_BYTES
from triptych.v1 import common_pb2, inference_pb2

_SAME = (
    "frequency_penalty", "presence_penalty", "min_p", "top_k", "min_tokens", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip
_UNLESS_ZERO = ("top_p", "repetition_penalty", "n")
_WITH_PRESENCE = ("temperature", "max_tokens", "logprobs", "prompt_logprobs")
_TEXT_FORMS = ("json_schema", "regex", "grammar", "structural_tag")
_NOT_HERE = {
    "mm_inputs": "multimodal inputs are not supported",
    "media_refs": "multimodal inputs are not supported",
    "kv_transfer_params": "KV transfer between engines is not supported",
    "kv_transfer_params_json": "KV transfer between engines is not supported",
}


def to_generate(
    request: vllm_engine_pb2.GenerateRequest, max_model_len: int
) -> inference_pb2.GenerateRequest:
    """The same request. Its field names are the ones that an error names.

    `max_model_len` is what truncate_prompt_tokens -1 leaves room for. Raises InvalidRequest.
    """
    for field, why in _NOT_HERE.items():
        if request.HasField(field):
            raise InvalidRequest(field, why)
    if request.extra_mm_inputs:
        raise InvalidRequest("extra_mm_inputs", _NOT_HERE["mm_inputs"])
    if request.data_parallel_rank:
        raise InvalidRequest("data_parallel_rank", "there is one engine behind this port: rank 0")
    answer = inference_pb2.GenerateRequest(
        output_format=inference_pb2.OUTPUT_FORMAT_TOKEN_IDS,
        sampling_params=sampling_params(request.sampling_params),
    )
    label = request.request_id.encode()[:MAX_REQUEST_ID_BYTES].decode(errors="ignore")
    answer.request_id = label  # a label for logs only: cut rather than refused
    match request.WhichOneof("input"):
        case "tokenized":
            ids = request.tokenized.input_ids
            answer.token_ids.ids.extend(ids[_first_kept(request, len(ids), max_model_len) :])
        case "text":
            if request.sampling_params.HasField("truncate_prompt_tokens"):
                raise InvalidRequest(
                    "sampling_params.truncate_prompt_tokens", "it goes with tokenized input only"
                )
            answer.text = request.text
        case None:
            raise InvalidRequest("input", "it is not set; set tokenized or text")
    return answer


def sampling_params(raw: vllm_engine_pb2.SamplingParams) -> common_pb2.SamplingParams:
    """The parameters alone. Raises InvalidRequest."""
    params = common_pb2.SamplingParams(stop=raw.stop, stop_token_ids=raw.stop_token_ids)
    for field in _SAME:
        setattr(params, field, getattr(raw, field))
    for field in _UNLESS_ZERO:
        if getattr(raw, field):
            setattr(params, field, getattr(raw, field))
    for field in _WITH_PRESENCE:
        if raw.HasField(field):
            setattr(params, field, getattr(raw, field))
    if raw.HasField("seed"):
        params.seed = raw.seed & (2**64 - 1)  # a negative one is as good as any other
    for token_id, bias in raw.logit_bias.items():
        if token_id < 0:
            raise InvalidRequest("sampling_params.logit_bias", f"token id {token_id} is below 0")
        params.logit_bias[token_id] = bias
    _add_form(raw, params)
    return params


def _add_form(raw: vllm_engine_pb2.SamplingParams, params: common_pb2.SamplingParams) -> None:
    form = raw.WhichOneof("constraint")
    if form in _TEXT_FORMS:
        setattr(params.structured_output, form, getattr(raw, form))
    elif form == "choice":
        params.structured_output.choice.texts.extend(raw.choice.choices)
    elif form == "json_object" and raw.json_object:
        params.structured_output.json_object = True


def _first_kept(
    request: vllm_engine_pb2.GenerateRequest, num_tokens: int, max_model_len: int
) -> int:
    """Where the prompt begins: its end is what is kept, as in vLLM."""
    raw = request.sampling_params
    if not raw.HasField("truncate_prompt_tokens"):
        return 0
    kept: int = raw.truncate_prompt_tokens
    if kept == -1:
        kept = max(1, max_model_len - max(1, raw.max_tokens))
    if kept < 1:
        raise InvalidRequest(
            "sampling_params.truncate_prompt_tokens", f"{kept} is not -1, nor above 0"
        )
    return max(0, num_tokens - kept)
