"""The one way in which text goes through the `tokenizers` package."""

import tokenizers

_QUICK_CHARACTERS = 4096  # about a millisecond


def encoded(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """Token ids of a text, nothing added around it.

    The package holds the GIL in `encode` and not in `encode_batch_fast`, so a long text on another
    thread does not hold up the event loop: beats, streams and health go on meanwhile.
    """
    if len(text) <= _QUICK_CHARACTERS:
        return backend.encode(text, add_special_tokens=False).ids
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
