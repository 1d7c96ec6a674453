"""Text to token ids and back, for one model, on top of the `tokenizers` package.

Two kinds of text come in. A raw prompt is parsed: special tokens that it spells become special
tokens, as people who write templates by hand expect. A chat message is never parsed: whatever it
spells stays text, and only the model's template writes special tokens. BOS is never doubled: a
rendered chat gets no special tokens added, and a raw text that begins with them gets no others.

Every method is thread-safe. Knows nothing of requests, streams or sockets.
"""

from collections.abc import Callable, Iterable, Sequence

from triptych.engine_core.errors import InvalidRequest
from triptych.services.runtime.model_files import ModelFiles
from triptych.services.tokenizer.chat_messages import ChatMessage, ChatOptions
from triptych.services.tokenizer.chat_template import ChatTemplate
from triptych.services.tokenizer.detokenizer import (
    IncrementalDetokenizer,
    PieceTable,
    build_piece_table,
)
from triptych.services.tokenizer.encoding import encoded
from triptych.services.tokenizer.folder_tokenizer import read_folder_tokenizer
from triptych.services.tokenizer.gguf_tokenizer import read_gguf_tokenizer
from triptych.services.tokenizer.special_marks import MarkedEncoder, SpecialMarks
from triptych.services.tokenizer.tokenizer_parts import TokenizerParts


def load_tokenizer(files: ModelFiles) -> "Tokenizer":
    """The tokenizer of a model. Raises StartupError saying what is missing or broken."""
    if files.kind == "gguf":
        return Tokenizer(read_gguf_tokenizer(files.path))
    return Tokenizer(read_folder_tokenizer(files.path))


_PLAIN = ChatOptions()


class Tokenizer:
    """One model's tokenizer and chat template."""

    def __init__(self, parts: TokenizerParts) -> None:
        """Raises StartupError for a chat template that cannot be compiled."""
        self._backend = parts.backend
        self._unk = parts.unk_token_id
        self.vocabulary_size = parts.vocabulary_size
        """Token ids are below this number."""
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids
        """Ids that end an answer."""
        special = {
            token.content: token_id
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._special = frozenset(special.values())
        self._special_by_text = special
        self._pieces = build_piece_table(self._backend, parts.vocabulary_size)
        self._prefix, self._suffix = self._added_around()
        self._marks = marks = SpecialMarks(special)
        self._marked = MarkedEncoder(self._backend, marks)
        self.chat_template_source = parts.tool_template or parts.chat_template or ""
        """Jinja, of the template for chats with tools where there are two; "" for none."""
        self._template = _template(parts.chat_template, parts, marks)
        self._tool_template = _template(parts.tool_template, parts, marks) or self._template

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can be used."""
        return self._template is not None

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out of the text."""
        return self._special

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Those of the texts that are special tokens."""
        known = self._special_by_text
        return frozenset(known[text] for text in texts if text in known)

    @property
    def piece_table(self) -> PieceTable | None:
        """The bytes of every token, where the decoder works token by token."""
        return self._pieces

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of a text; `parse_special` false keeps spelled special tokens text.

        `add_special_tokens` adds what the model wants around a text (such as BOS), unless the text
        brings it along. Raises InvalidRequest naming `text` for text that has no encoding.
        """
        ids = encoded(self._backend, text) if parse_special else self._encode_marked(text, "text")
        if not add_special_tokens:
            return ids
        prefix = [] if self._prefix and ids[: len(self._prefix)] == self._prefix else self._prefix
        suffix = [] if self._suffix and ids[-len(self._suffix) :] == self._suffix else self._suffix
        return [*prefix, *ids, *suffix]

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        options: ChatOptions = _PLAIN,
        check: Callable[[str], None] | None = None,
    ) -> list[int]:
        """Token ids of the rendered chat. Special tokens come from the template only.

        `check` gets the rendered text before it is encoded, and may raise. Raises InvalidRequest
        naming `messages`: refused by the template, or no template at all.
        """
        template = self._tool_template if options.tools else self._template
        if template is None:
            raise InvalidRequest(
                "messages", "the model has no chat template; send a prompt instead"
            )
        rendered = template.render(messages, options)
        if check is not None:
            check(self._marks.spelled_out(rendered))
        return self._encode_marked(rendered, "messages")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the tokens: what a detokenizer without a prompt would send, joined."""
        if self._pieces is None:
            return self.decode_whole(token_ids, skip_special_tokens=skip_special_tokens)
        stream = IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)
        return stream.push(token_ids) + stream.finish()

    def decode_whole(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The `tokenizers` package's own decoding."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds in the middle of a text; b"" for an id that means nothing."""
        if self._pieces is None:
            return self.decode_whole([token_id], skip_special_tokens=False).encode()
        pieces = self._pieces.pieces
        return pieces[token_id] if 0 <= token_id < len(pieces) else b""

    def token_text(self, token_id: int) -> str:
        """A token for people to read: bytes that are no character on their own as \\xNN."""
        return self.token_bytes(token_id).decode(errors="backslashreplace")

    def _encode_marked(self, text: str, field: str) -> list[int]:
        try:
            return self._marked.encode(text, may_appear=self._unk)
        except ValueError as error:
            raise InvalidRequest(field, str(error)) from error

    def _added_around(self) -> tuple[list[int], list[int]]:
        """What the post-processor puts before and after a text."""
        around = self._backend.encode("", add_special_tokens=True).ids
        ids = self._backend.encode("a", add_special_tokens=False).ids
        both = self._backend.encode("a", add_special_tokens=True).ids
        for start in reversed(range(len(around) + 1)):
            if both[start : start + len(ids)] == ids:
                return both[:start], both[start + len(ids) :]
        return [], []


def _template(
    source: str | None, parts: TokenizerParts, marks: SpecialMarks
) -> ChatTemplate | None:
    return None if source is None else ChatTemplate(source, parts.special_tokens, marks)
