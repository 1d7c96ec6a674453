"""Prompts as token ids, without holding up the event loop: long texts are read on other threads.

The `tokenizers` package releases the GIL. A text that is clearly too long for the context is
refused after reading a part of it, so that its size costs nothing. What waits for a thread waits on
the event loop: a caller that goes meanwhile takes its text along, and nothing is computed for it.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from triptych.engine_core.errors import NotSupported, TooLong
from triptych.services.tokenizer.chat_input import ChatInput
from triptych.services.tokenizer.tokenizer import Tokenizer
from triptych.services.tokenizer.validation import TokenArray, token_array

_THREADS = 2
_INLINE_CHARACTERS = 4096  # about a millisecond
_PROBE_CHARACTERS = 1 << 16
_END_TOKENS = 100
_PROBE_PER_TOKEN = 16  # of a text at this many characters per token, a probe tells nothing

Result = TypeVar("Result")


class Prompts:
    """One tokenizer, used from the event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")
        self._idle = asyncio.Semaphore(_THREADS)

    async def text(self, text: str, special: bool, max_model_len: int | None) -> TokenArray:
        """u32 [n] of a text; `special` adds the model's tokens around it.

        Raises TooLong when it cannot fit `max_model_len` (None: no bound).
        """

        def read() -> TokenArray:
            self._probe("text", (text,), max_model_len)
            return token_array(self._tokenizer.encode(text, add_special_tokens=special))

        return await self._run(len(text), read)

    async def chat(self, chat: ChatInput, max_model_len: int | None) -> TokenArray:
        """u32 [n] of a chat. Raises NotSupported, TooLong, or InvalidRequest by the template."""
        if not self._tokenizer.has_chat_template:
            raise NotSupported("the model has no chat template; use Generate with a prompt")

        def read() -> TokenArray:
            self._probe("messages", [each.content for each in chat.messages], max_model_len)
            # Of calls, thoughts and tools, a template may show some or none: it is asked first.
            check = partial(self._probe_rendered, max_model_len)
            return token_array(self._tokenizer.encode_chat(chat.messages, chat.options, check))

        # What variables make a template do, nobody knows: not on the event loop.
        size = max(chat.size, _INLINE_CHARACTERS + 1) if chat.options.variables else chat.size
        return await self._run(size, read)

    def end_of(self, token_ids: TokenArray) -> str:
        """The last characters of a prompt, special tokens spelled out."""
        ids: list[int] = token_ids[-_END_TOKENS:].tolist()
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    async def detokenize(self, token_ids: TokenArray, skip_special_tokens: bool) -> str:
        """The text of the tokens."""
        ids: list[int] = token_ids.tolist()
        return await self._run(
            len(ids), lambda: self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        )

    def close(self) -> None:
        """Wait for nothing; what still waits is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _probe_rendered(self, max_model_len: int | None, text: str) -> None:
        self._probe("messages", (text,), max_model_len)

    def _probe(self, field: str, texts: Sequence[str], max_model_len: int | None) -> None:
        """Refuse what has twice the tokens of the context in its first part alone.

        Twice, because cutting a text may cost a few tokens: no text that fits is ever refused.
        """
        if max_model_len is None:
            return
        size = max(_PROBE_CHARACTERS, _PROBE_PER_TOKEN * max_model_len)
        if sum(map(len, texts)) <= size:
            return
        part = "".join(texts)[:size]
        ids = self._tokenizer.encode(part, add_special_tokens=False, parse_special=False)
        if len(ids) > 2 * max_model_len + _INLINE_CHARACTERS:
            raise TooLong(
                field,
                f"a prompt of more than {len(ids)} tokens must be shorter than max_model_len"
                f" {max_model_len}",
            )

    async def _run(self, size: int, work: Callable[[], Result]) -> Result:
        if size <= _INLINE_CHARACTERS:
            return work()
        await self._idle.acquire()
        loop = asyncio.get_running_loop()

        def ended(_future: Future[Result]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._idle.release)

        # Until the thread is done, not until the caller is: one that goes leaves its thread busy.
        future = self._pool.submit(work)
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)
