"""The bytes of every token, as the tokenizer process tells them to the scheduler, for grammars.

Total: every message gives a value or raises InvalidRequest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.engine_core.errors import InvalidRequest
from triptych.services.transport.wire import pack_u32, unpack_u32
from triptych.v1 import stage_pb2

MAX_VOCABULARY_BYTES = 24 * 2**20
"""Of a Vocabulary message, so that it fits a frame (channel.MAX_FRAME_BYTES) with room to spare:
the largest vocabularies of today, with 262,144 tokens, take 3 MiB."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens`: by id, what each adds in the middle of a text; empty: it never matches. The ids of
    special tokens and of those that end a text are below len(tokens)."""

    tokens: tuple[bytes, ...]
    special_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for field in ("special_token_ids", "eos_token_ids"):
            for token_id in getattr(self, field):
                if not 0 <= token_id < len(self.tokens):
                    raise InvalidRequest(
                        field, f"{token_id} is not within the {len(self.tokens)} tokens"
                    )


def vocabulary_message(vocabulary: Vocabulary) -> stage_pb2.Vocabulary:
    """The vocabulary as a message. Raises InvalidRequest when it is too large for one."""
    message = stage_pb2.Vocabulary(
        lengths=pack_u32([len(token) for token in vocabulary.tokens]),
        data=b"".join(vocabulary.tokens),
        special_token_ids=pack_u32(vocabulary.special_token_ids),
        eos_token_ids=pack_u32(vocabulary.eos_token_ids),
    )
    _check_size(message)
    return message


def vocabulary_from(message: stage_pb2.Vocabulary) -> Vocabulary:
    """The vocabulary that a message has. Raises InvalidRequest for torn or contrary columns."""
    _check_size(message)
    lengths = unpack_u32(message.lengths, "lengths")
    if sum(lengths) != len(message.data):
        raise InvalidRequest(
            "lengths", f"they make {sum(lengths)}, not the {len(message.data)} bytes"
        )
    return Vocabulary(
        tuple(_cut(message.data, lengths)),
        unpack_u32(message.special_token_ids, "special_token_ids"),
        unpack_u32(message.eos_token_ids, "eos_token_ids"),
    )


def _check_size(message: stage_pb2.Vocabulary) -> None:
    size = message.ByteSize()
    if size > MAX_VOCABULARY_BYTES:
        raise InvalidRequest("vocabulary", f"{size} bytes, more than {MAX_VOCABULARY_BYTES}")


def _cut(data: bytes, lengths: Sequence[int]) -> list[bytes]:
    tokens, begin = [], 0
    for length in lengths:
        tokens.append(data[begin : begin + length])
        begin += length
    return tokens
