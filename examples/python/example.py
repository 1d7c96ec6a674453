"""Everything that a service does with the engine, one command each.

    python example.py ADDRESS [generate [PROMPT [MAX_TOKENS]] | chat | cancel | deadline | refused |
                               session | many]

Without a command: all of them.
"""

import asyncio
import sys
from collections.abc import Callable

from triptych.client.api import (
    DEFAULT_ADDRESS,
    AsyncClient,
    Client,
    DeadlineExceeded,
    FinishReason,
    InvalidRequest,
    SamplingParams,
    TriptychError,
)


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)


def generate(address: str, prompt: str = "Once upon a time", max_tokens: str = "32") -> None:
    """Stream a completion. Should the connection break in its middle, it goes on."""
    with Client(address) as client:
        tokens = 0
        for piece in client.generate(prompt, params(int(max_tokens))):
            print(piece.text, end="", flush=True)
            tokens += len(piece.token_ids)
        print(f"\n[{tokens} tokens]")


def chat(address: str) -> None:
    """A whole answer at once."""
    with Client(address) as client:
        greedy = SamplingParams(max_tokens=32, temperature=0)
        print(client.chat("Name three colours.", greedy).answer().text)


def cancel(address: str) -> None:
    """Leaving a stream cancels it; `stream.cancel()` does so from another thread."""
    with Client(address) as client:
        with client.generate("Count for ever:", params(500)) as stream:
            pieces = [next(stream) for _ in range(3)]
        print(f"cancelled after {len(pieces)} pieces")


def deadline(address: str) -> None:
    """`timeout` is for everything, retries included."""
    with Client(address) as client:
        try:
            client.generate("Too slow:", params(500), timeout=0.005).answer()
            print("faster than its deadline")
        except DeadlineExceeded:
            print("deadline exceeded, as it should be")


def refused(address: str) -> None:
    """Errors are types; a bad value names its field."""
    with Client(address) as client:
        try:
            client.generate("x", SamplingParams(top_p=1.5)).answer()
            print("not refused")
        except InvalidRequest as error:
            print(f"refused: {error.field}")


def session(address: str) -> None:
    """Many requests on one stream: the cheap form for sidecars."""
    with Client(address) as client, client.session() as session:
        streams = [session.generate("Request", params(16)) for _ in range(4)]
        unwanted = session.generate("Unwanted", params(500))
        unwanted.cancel()
        print("request 5 was aborted")
        for at, stream in enumerate(streams, 1):
            answer = stream.answer()
            assert answer.finish_reason == FinishReason.FINISH_REASON_LENGTH
            print(f"request {at}: {len(answer.token_ids)} tokens")


def many(address: str) -> None:
    """The same with asyncio."""

    async def main() -> None:
        async with AsyncClient(address) as client:
            streams = [client.generate(f"Number {each}", params(8)) for each in range(10)]
            answers = await asyncio.gather(*(stream.answer() for stream in streams))
            print(f"{len(answers)} answers, {sum(len(each.token_ids) for each in answers)} tokens")

    asyncio.run(main())


COMMANDS: dict[str, Callable[..., None]] = {
    each.__name__: each for each in (generate, chat, cancel, deadline, refused, session, many)
}


def main(address: str = DEFAULT_ADDRESS, wanted: str = "", *arguments: str) -> None:
    """Run one command, or all."""
    if wanted and wanted not in COMMANDS:
        sys.exit("usage: python example.py ADDRESS [COMMAND [ARGUMENTS]]")
    for name, command in COMMANDS.items():
        if wanted in ("", name):
            print(f"== {name}")
            try:
                command(address, *arguments)
            except TriptychError as error:
                sys.exit(f"example: {error.code.name}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
