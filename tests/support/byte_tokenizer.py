"""A tokenizer without files, for streams: token id = byte; 256 is a special end of sequence."""

from collections.abc import Sequence

from triptych.services.tokenizer.detokenizer import FirstPiece, IncrementalDetokenizer, PieceTable

EOS = 256


class ByteTokenizer:
    """What a detokenizer needs."""

    piece_table = PieceTable([*(bytes([b]) for b in range(256)), b"<eos>"], FirstPiece.AS_IT_IS)
    special_token_ids = frozenset({EOS})

    def decode_whole(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        raise AssertionError("a tokenizer with a piece table is never asked for windows")


def byte_detokenizer(*, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
    """One for a new output."""
    return IncrementalDetokenizer(ByteTokenizer(), skip_special_tokens=skip_special_tokens)
