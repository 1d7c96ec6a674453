"""`triptych generate`: completes a prompt and streams the answer to the terminal."""

import sys
from collections.abc import Sequence

import grpc

from triptych.services.cli.client import Client, describe, print_stream, print_summary
from triptych.services.cli.client_flags import client_parser, sampling_params
from triptych.services.runtime.lifecycle import EXIT_FAILED, EXIT_OK, print_error
from triptych.v1 import inference_pb2


def run(argv: Sequence[str]) -> int:
    """The body of `triptych generate`. Raises StartupError for a bad command line."""
    parser = client_parser("triptych generate", "Complete a prompt.")
    parser.add_argument("prompt", metavar="PROMPT", help="text to go on from; - reads stdin")
    given = parser.parse(argv)
    prompt = sys.stdin.read() if given.prompt == "-" else given.prompt
    request = inference_pb2.GenerateRequest(
        model=given.model,
        text=prompt,
        sampling_params=sampling_params(given),
        output_format=inference_pb2.OUTPUT_FORMAT_TEXT,
    )
    with Client(given.address) as client:
        try:
            print_summary(print_stream(client.generate(request, given.timeout), sys.stdout))
        except grpc.RpcError as error:
            print_error("generate", describe(error))
            return EXIT_FAILED
    return EXIT_OK
