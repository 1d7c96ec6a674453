"""The flags that `generate` and `chat` share: where to call, and how to sample."""

import argparse

from triptych.services.cli.client import DEFAULT_ADDRESS
from triptych.services.runtime.command_line import LineParser
from triptych.services.runtime.lifecycle import StartupError
from triptych.v1 import common_pb2

_U32 = (1 << 32) - 1


def client_parser(prog: str, description: str) -> LineParser:
    """A parser with the shared flags. Bounds are the server's to check: it names them."""
    parser = LineParser(prog=prog, description=description, allow_abbrev=False)
    call = parser.add_argument_group("Call")
    call.add_argument("--address", default=DEFAULT_ADDRESS, help="default %(default)s")
    call.add_argument("--model", default="", help="name of the model; default the one served")
    call.add_argument("--timeout", type=float, help="deadline in seconds; default none")
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
    return parser


def sampling_params(given: argparse.Namespace) -> common_pb2.SamplingParams:
    """The message, with only those fields set that were given. Raises StartupError."""
    params = common_pb2.SamplingParams()
    for name in ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed"):
        value = getattr(given, name)
        if value is None:
            continue
        try:
            setattr(params, name, value)
        except ValueError as error:
            raise _out_of_range(name, value) from error
    if given.ignore_eos is not None:
        params.ignore_eos = given.ignore_eos
    params.stop.extend(given.stop or ())
    for token_id in given.stop_token_id or ():
        if not 0 <= token_id <= _U32:
            raise _out_of_range("stop_token_id", token_id)
        params.stop_token_ids.append(token_id)
    return params


def _out_of_range(name: str, value: object) -> StartupError:
    return StartupError(f"--{name.replace('_', '-')}: {value} does not fit its field")
