"""Random texts that a grammar lets through, drawn byte by byte from its masks."""

import random

from triptych.services.tokenizer.structured_output.compilation import byte_matcher

END = 256
_CLOSING = frozenset(b'"}]')


class DeadEnd(Exception):
    """The grammar lets nothing follow what it let through."""


def accepts(grammar: str, text: str | bytes) -> bool:
    """Whether the whole text matches."""
    data = text.encode() if isinstance(text, str) else text
    matcher = byte_matcher(grammar)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


def walk(grammar: str, draw: random.Random, most: int = 2000) -> bytes | None:
    """A text that matches; None where it did not end within `most` bytes. Raises DeadEnd."""
    matcher = byte_matcher(grammar)
    written = bytearray()
    while len(written) < most:
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise DeadEnd(f"{bytes(written)!r}: {matcher.get_error()}")
        allowed = [token for token in range(END + 1) if mask[token // 8] >> token % 8 & 1]
        if not allowed:
            raise DeadEnd(bytes(written))
        if END in allowed and (len(allowed) == 1 or draw.random() < 0.7):
            return bytes(written)
        choice = _choice([token for token in allowed if token != END], draw)
        written.append(choice)
        if not matcher.consume_token(choice):
            raise DeadEnd(f"{bytes(written)!r}: {matcher.get_error()}")
    return None


def _choice(allowed: list[int], draw: random.Random) -> int:
    closing = [token for token in allowed if token in _CLOSING]
    if closing and draw.random() < 0.5:
        return draw.choice(closing)
    if draw.random() < 0.8:  # mostly ASCII: what can be said at all is 128 of 256 bytes anyway
        return draw.choice([token for token in allowed if token < 0x80] or allowed)
    return draw.choice(allowed)
