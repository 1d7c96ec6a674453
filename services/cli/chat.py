"""`triptych chat`: one answer to a message, or a conversation when none is given."""

import sys
from collections.abc import Callable, Sequence
from functools import partial

import grpc

from triptych.services.cli.client import Answer, Client, describe, print_stream, print_summary
from triptych.services.cli.client_flags import client_parser, label_request, sampling_params
from triptych.services.runtime.lifecycle import EXIT_FAILED, EXIT_OK, print_error
from triptych.v1 import common_pb2, inference_pb2


class Conversation:
    """The messages so far. A turn that failed or was cancelled leaves no trace in them."""

    def __init__(
        self,
        client: Client,
        params: common_pb2.SamplingParams,
        *,
        model: str = "",
        system: str = "",
        template_kwargs: str = "",
        timeout: float | None = None,
        label: Callable[[inference_pb2.ChatRequest], None] = lambda _request: None,
    ) -> None:
        """`label` sets what every request carries beside its messages."""
        self._client = client
        self._params = params
        self._model = model
        self._template_kwargs = template_kwargs
        self._timeout = timeout
        self._label = label
        self.messages: list[inference_pb2.ChatMessage] = []
        if system:
            self.messages.append(inference_pb2.ChatMessage(role="system", content=system))

    def ask(self, content: str) -> Answer:
        """Stream the answer to stdout. Raises grpc.RpcError, and KeyboardInterrupt on Ctrl-C."""
        asked = [*self.messages, inference_pb2.ChatMessage(role="user", content=content)]
        request = inference_pb2.ChatRequest(
            model=self._model,
            messages=asked,
            sampling_params=self._params,
            output_format=inference_pb2.OUTPUT_FORMAT_TEXT,
            chat_template_kwargs=self._template_kwargs,
        )
        self._label(request)
        answer = print_stream(self._client.chat(request, self._timeout), sys.stdout)
        reply = inference_pb2.ChatMessage(
            role="assistant", content=answer.text, reasoning=answer.reasoning
        )
        self.messages = [*asked, reply]
        return answer


def run(argv: Sequence[str]) -> int:
    """The body of `triptych chat`. Raises StartupError for a bad command line."""
    parser = client_parser("triptych chat", "Talk with the model.")
    parser.add_argument("message", metavar="MESSAGE", nargs="?", help="none: a conversation")
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    parser.add_argument(
        "--chat-template-kwargs",
        default="",
        metavar="JSON",
        help='variables of the chat template, such as {"enable_thinking": false}',
    )
    given = parser.parse(argv)
    with Client(given.address) as client:
        conversation = Conversation(
            client,
            sampling_params(given),
            model=given.model,
            system=given.system,
            template_kwargs=given.chat_template_kwargs,
            timeout=given.timeout,
            label=partial(label_request, given=given),
        )
        if given.message is None:
            return _converse(conversation)
        try:
            print_summary(conversation.ask(given.message))
        except grpc.RpcError as error:
            print_error("chat", describe(error))
            return EXIT_FAILED
    return EXIT_OK


def _converse(conversation: Conversation) -> int:
    """Read messages until end of input. Ctrl-C ends the running answer, or the input line."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  # gives input() line editing and history

        print("Ctrl-C ends an answer, Ctrl-D ends the conversation.", file=sys.stderr)
    code = EXIT_OK
    while True:
        try:
            message = input("> " if interactive else "").strip()
            if not message:
                continue
            print_summary(conversation.ask(message))
        except EOFError:
            return code
        except KeyboardInterrupt:
            print("(cancelled)", file=sys.stderr)
        except grpc.RpcError as error:
            print_error("chat", describe(error))
            if not interactive:
                return EXIT_FAILED
