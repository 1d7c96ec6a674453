"""What a model's files say about its tokenizer, whatever their format."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import tokenizers
from tokenizers.processors import TemplateProcessing


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """The common form that GGUF metadata and model folders are read into."""

    backend: tokenizers.Tokenizer
    vocabulary_size: int
    """One more than the largest token id, added tokens included."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    unk_token_id: int | None
    special_tokens: Mapping[str, str]
    """Names as chat templates know them (`bos_token`, ...) to their text."""
    chat_template: str | None
    """Jinja source."""
    tool_template: str | None = None
    """The one that is meant for chats with tools, where it is another."""


def around_text(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> TemplateProcessing:
    """A post-processor that puts the given tokens (text and id) before and after a text."""
    single = " ".join(
        [*([f"{bos[0]}:0"] if bos else []), "$A:0", *([f"{eos[0]}:0"] if eos else [])]
    )
    return TemplateProcessing(single=single, special_tokens=list(_present((bos, eos))))


def _present(tokens: Iterable[tuple[str, int] | None]) -> Iterable[tuple[str, int]]:
    return dict(token for token in tokens if token is not None).items()
