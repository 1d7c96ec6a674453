"""Logprobs in OpenAI's two shapes, and vLLM's prompt_logprobs.

`bytes` of a token are its own: joined, they are the text, also where a character spans several
tokens. `token` is for people: bytes that are no character on their own are written \\xNN. A special
token that is left out of the text has no bytes. JSON has no -infinity: LEAST stands for it.
"""

import codecs
from collections.abc import Iterable, Sequence

from triptych.v1 import common_pb2

LEAST = -9999.0

Row = common_pb2.TokenLogprob
Json = dict[str, object]


class ChatLogprobs:
    """Chat's shape: {"content": [{token, logprob, bytes, top_logprobs}]}."""

    def __init__(self, *, as_ids: bool = False) -> None:
        """`as_ids`: tokens are named token_id:N."""
        self._as_ids = as_ids

    def rows(self, rows: Iterable[Row]) -> list[object]:
        """The entries of `content`."""
        return [self._entry(row) | {"top_logprobs": self._top(row)} for row in rows]

    def _top(self, row: Row) -> list[Json]:
        if row.vocabulary_logprobs:
            return [
                {"token": f"token_id:{token_id}", "logprob": finite(logprob), "bytes": None}
                for token_id, logprob in enumerate(row.vocabulary_logprobs)
            ]
        return [self._entry(each) for each in row.top]

    def _entry(self, token: Row | common_pb2.TopLogprob) -> Json:
        return {
            "token": named(token, self._as_ids),
            "logprob": finite(token.logprob),
            "bytes": list(token.token),
        }


class CompletionLogprobs:
    """Completions' shape: four lists of equal length. Keeps the offsets of one choice's text."""

    def __init__(self, *, as_ids: bool = False) -> None:
        self._as_ids = as_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def of(self, rows: Sequence[Row]) -> Json:
        """The object for the next tokens. The first token of an echoed prompt has null."""
        offsets = []
        for row in rows:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(row.token))
        return {
            "tokens": [named(row, self._as_ids) for row in rows],
            "token_logprobs": [finite(r.logprob) if r.HasField("logprob") else None for r in rows],
            "top_logprobs": [self._top(r) if r.HasField("logprob") else None for r in rows],
            "text_offset": offsets,
        }

    def _top(self, row: Row) -> Json:
        """By token; the drawn one is always there."""
        if row.vocabulary_logprobs:
            every = enumerate(row.vocabulary_logprobs)
            return {f"token_id:{token_id}": finite(logprob) for token_id, logprob in every}
        top: Json = {}
        for each in row.top:
            # Of two tokens with the same text, the likelier one.
            top.setdefault(named(each, self._as_ids), finite(each.logprob))
        top.setdefault(named(row, self._as_ids), finite(row.logprob))
        return top


def joined(parts: Sequence[Json]) -> Json:
    """Completions' objects of one choice as one."""
    whole: dict[str, list[object]] = {
        key: [] for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    for part in parts:
        for key, values in whole.items():
            more = part[key]
            assert isinstance(more, list)
            values.extend(more)
    return dict(whole)


def prompt_logprobs(rows: Iterable[Row]) -> list[Json | None]:
    """vLLM's: by token id, {logprob, rank, decoded_token}; null for the first token."""
    return [_prompt_entry(row) if row.HasField("logprob") else None for row in rows]


def _prompt_entry(row: Row) -> Json:
    entry: Json = {}
    for rank, each in enumerate(row.top, start=1):
        entry[str(each.token_id)] = _candidate(each.logprob, rank, each.text)
    entry[str(row.token_id)] = _candidate(row.logprob, row.rank, row.text)
    return entry


def _candidate(logprob: float, rank: int, text: str) -> Json:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}


def named(token: Row | common_pb2.TopLogprob, as_id: bool) -> str:
    """A token in `tokens` and the keys of top_logprobs."""
    return f"token_id:{token.token_id}" if as_id else token.text


def finite(logprob: float) -> float:
    """A number that JSON has."""
    return max(logprob, LEAST)
