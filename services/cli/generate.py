"""`triptych generate`: completes a prompt and streams the answer to the terminal."""

import sys
from collections.abc import Sequence

import grpc

from triptych.services.cli.choices import Choices
from triptych.services.cli.client import (
    Client,
    describe,
    print_stream,
    print_summary,
    read_stream,
)
from triptych.services.cli.client_flags import (
    add_choice_flags,
    choice_params,
    client_parser,
    label_request,
)
from triptych.services.runtime.lifecycle import EXIT_FAILED, EXIT_OK, print_error
from triptych.v1 import inference_pb2


def run(argv: Sequence[str]) -> int:
    """The body of `triptych generate`. Raises StartupError for a bad command line."""
    parser = client_parser("triptych generate", "Complete a prompt.")
    parser.add_argument("prompt", metavar="PROMPT", help="text to go on from; - reads stdin")
    add_choice_flags(parser)
    given = parser.parse(argv)
    prompt = sys.stdin.read() if given.prompt == "-" else given.prompt
    request = inference_pb2.GenerateRequest(
        model=given.model,
        text=prompt,
        sampling_params=choice_params(given),
        output_format=inference_pb2.OUTPUT_FORMAT_TEXT,
        echo=given.echo,
    )
    label_request(request, given)
    with Client(given.address) as client:
        try:
            choices = Choices(client.generate(request, given.timeout))
            if request.sampling_params.n > 1:
                answer = read_stream(choices)
                choices.print_texts(sys.stdout)
            else:
                answer = print_stream(choices, sys.stdout)
            choices.print_logprobs(sys.stderr)
            print_summary(answer)
        except grpc.RpcError as error:
            print_error("generate", describe(error))
            return EXIT_FAILED
    return EXIT_OK
