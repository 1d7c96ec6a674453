"""The flags that `generate` and `chat` share: where to call, and how to sample."""

import argparse
from collections.abc import Sequence

from triptych.services.cli.client import DEFAULT_ADDRESS
from triptych.services.cli.structured_flags import add_structured_flags, set_structured_output
from triptych.services.runtime.command_line import LineParser
from triptych.services.runtime.lifecycle import StartupError
from triptych.v1 import common_pb2, inference_pb2

_U32 = (1 << 32) - 1
_SCALARS = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "typical_p"),
    *("top_n_sigma", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    "no_repeat_ngram_size",
)


def client_parser(prog: str, description: str) -> LineParser:
    """A parser with the shared flags. Bounds are the server's to check: it names them."""
    parser = LineParser(prog=prog, description=description, allow_abbrev=False)
    call = parser.add_argument_group("Call")
    call.add_argument("--address", default=DEFAULT_ADDRESS, help="default %(default)s")
    call.add_argument("--model", default="", help="name of the model; default the one served")
    call.add_argument("--timeout", type=float, help="deadline in seconds; default none")
    call.add_argument("--queue-timeout", type=float, help="seconds that it may wait before it runs")
    call.add_argument("--priority", type=int, default=0, help="lower runs first; default 0")
    call.add_argument("--tenant", default="", help="who asks, for the fair policy")
    call.add_argument("--cache-salt", default="", help="share cached prefixes only with the same")
    sampling = parser.add_argument_group(
        "Sampling", "What is not given takes the server's default."
    )
    sampling.add_argument("--max-tokens", type=int, help="output tokens at most")
    sampling.add_argument("--min-tokens", type=int, help="output tokens at least")
    sampling.add_argument("--temperature", type=float, help="0 is greedy")
    sampling.add_argument("--top-p", type=float, help="keep the smallest set that reaches it")
    sampling.add_argument("--top-k", type=int, help="keep the k most likely tokens")
    sampling.add_argument("--min-p", type=float, help="keep tokens that are this likely")
    sampling.add_argument("--seed", type=int, help="same seed, same output")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="may be repeated")
    sampling.add_argument("--stop-token-id", action="append", type=int, help="may be repeated")
    sampling.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, help="go on after end of sequence"
    )
    _add_more_sampling(sampling)
    add_structured_flags(parser)
    return parser


def _add_more_sampling(sampling: "argparse._ArgumentGroup") -> None:
    add = sampling.add_argument
    add("--typical-p", type=float, help="keep tokens of about the expected information")
    add("--top-n-sigma", type=float, help="keep logits within so many deviations of the largest")
    add("--repetition-penalty", type=float, help="divides logits of what was said; 1 is off")
    add("--presence-penalty", type=float, help="off the logits of tokens in the output")
    add("--frequency-penalty", type=float, help="the same for each time they occur")
    add("--no-repeat-ngram-size", type=int, help="no so many tokens twice")
    add("--logit-bias", action="append", metavar="ID=BIAS", help="may be repeated")
    add("--allowed-token-id", action="append", type=int, metavar="ID", help="may be repeated")
    add("--bad-word", action="append", metavar="TEXT", help="not in the output; may be repeated")
    add(
        "--logits-processor",
        action="append",
        metavar="NAME[=JSON]",
        help="a plug-in of the engine; may be repeated",
    )


def add_choice_flags(parser: LineParser) -> None:
    """Several answers, beam search, logprobs: what a conversation has no use for."""
    choices = parser.add_argument_group("Choices")
    add = choices.add_argument
    add("--n", type=int, help="answers to the prompt")
    add("--best-of", type=int, help="draw so many, keep the best")
    add("--beam-width", type=int, help="beam search instead of sampling")
    add("--length-penalty", type=float, help="of beam search; default 1")
    add("--early-stopping", choices=("true", "false", "never"), help="of beam search")
    add("--logprobs", type=int, help="report so many likely tokens beside each; 0: itself only")
    add("--prompt-logprobs", type=int, help="the same for the prompt")
    add("--echo", action="store_true", help="begin with the prompt")


def choice_params(given: argparse.Namespace) -> common_pb2.SamplingParams:
    """As `sampling_params`, with what `add_choice_flags` adds. Raises StartupError."""
    params = sampling_params(given)
    for name in ("n", "best_of", "logprobs", "prompt_logprobs"):
        _set(params, name, getattr(given, name))
    if given.beam_width is not None:
        _set(params.beam, "width", given.beam_width, "beam_width")
        _set(params.beam, "length_penalty", given.length_penalty)
        if given.early_stopping is not None:
            name = f"EARLY_STOPPING_{given.early_stopping.upper()}"
            params.beam.early_stopping = common_pb2.EarlyStopping.Value(name)
    elif given.length_penalty is not None or given.early_stopping is not None:
        raise StartupError("--length-penalty and --early-stopping need --beam-width")
    return params


def label_request(
    request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest, given: argparse.Namespace
) -> None:
    """Set the request's labels, priority and time-out. Raises StartupError."""
    request.tenant, request.cache_salt = given.tenant, given.cache_salt
    _set(request, "priority", given.priority)
    if given.queue_timeout is not None:
        _set(request, "queue_timeout_ms", round(given.queue_timeout * 1000), "queue_timeout")


def sampling_params(given: argparse.Namespace) -> common_pb2.SamplingParams:
    """The message, with only those fields set that were given. Raises StartupError."""
    params = common_pb2.SamplingParams()
    for name in _SCALARS:
        _set(params, name, getattr(given, name))
    if given.ignore_eos is not None:
        params.ignore_eos = given.ignore_eos
    params.stop.extend(given.stop or ())
    params.stop_token_ids.extend(_ids("stop_token_id", given.stop_token_id))
    if given.allowed_token_id:
        params.allowed_token_ids.ids.extend(_ids("allowed_token_id", given.allowed_token_id))
    params.bad_words.extend(given.bad_word or ())
    for text in given.logit_bias or ():
        token_id, bias = _logit_bias(text)
        params.logit_bias[token_id] = bias
    for text in given.logits_processor or ():
        name, _, argument = text.partition("=")
        params.logits_processors.add(name=name, argument=argument)
    set_structured_output(params, given)
    return params


def _set(
    message: common_pb2.SamplingParams
    | common_pb2.BeamSearch
    | inference_pb2.GenerateRequest
    | inference_pb2.ChatRequest,
    name: str,
    value: float | None,
    flag: str = "",
) -> None:
    if value is None:
        return
    try:
        setattr(message, name, value)
    except ValueError as error:
        raise _out_of_range(flag or name, value) from error


def _ids(flag: str, given: Sequence[int] | None) -> Sequence[int]:
    for token_id in given or ():
        if not 0 <= token_id <= _U32:
            raise _out_of_range(flag, token_id)
    return given or ()


def _logit_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        (number,) = _ids("logit_bias", [int(token_id)])
        return number, float(bias)
    except ValueError as error:
        raise StartupError(f"--logit-bias: {text!r} is not ID=BIAS, such as 42=-1.5") from error


def _out_of_range(name: str, value: object) -> StartupError:
    return StartupError(f"--{name.replace('_', '-')}: {value} does not fit its field")
