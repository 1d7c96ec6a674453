"""The last outputs of all requests, and where in them tokens occurred.

What suffix decoding (Oliaro et al. 2024, "SuffixDecoding") keeps in suffix trees, in a form that is
cheap to keep: for each n-gram of a fixed size its last occurrences. From there the texts themselves
are read, backwards for the longest match and forwards for what followed most often.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

PIECE_TOKENS = 512
"""Longer outputs are kept in pieces of so many tokens, each of which is forgotten by itself."""
MOST_OCCURRENCES = 8
"""Of one n-gram so many occurrences are known, the last ones indexed."""
LONGEST_MATCH = 32
"""Matches are not told apart beyond so many tokens."""
LEAST_SHARE = 0.25
"""A continuation ends where fewer of the matches than that would still agree with it."""


class Piece(NamedTuple):
    """Some tokens of one output."""

    salt: str
    token_ids: "array[int]"


class StoredMatch(NamedTuple):
    """The `length` tokens before each of `places` are the asked text's last ones.

    A place is number of a piece * PIECE_TOKENS + position in it; the last indexed ones come first.
    """

    length: int
    places: list[int]


class OutputStore:
    """Outputs by salt, at most `most_tokens` of them: those used longest ago are forgotten first.

    `gram` is the size of the indexed n-grams, and so of the shortest match. An output waits until
    `work` indexes it, so that what a step adds and forgets is bounded.
    """

    def __init__(self, gram: int, most_tokens: int) -> None:
        self._gram = gram
        self._most_tokens = most_tokens
        self._waiting: deque[Piece] = deque()
        self._num_waiting = 0
        self._next_number = 0
        self._pieces: OrderedDict[int, Piece] = OrderedDict()  # used longest ago first
        self._num_indexed = 0
        # Bytes, integers and arrays only, which Python's garbage collector does not visit.
        self._places: dict[str, dict[bytes, array[int]]] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens of outputs that can be found."""
        return self._num_indexed

    @property
    def num_waiting(self) -> int:
        """Tokens of outputs that are yet to be indexed."""
        return self._num_waiting

    @property
    def num_grams(self) -> int:
        """Entries of the index."""
        return sum(len(places) for places in self._places.values())

    def add(self, salt: str, token_ids: Sequence[int]) -> None:
        """Keep an output; of one longer than the store its end, of one too short to match nothing.

        Outputs that wait beyond `most_tokens` are dropped, the first ones first.
        """
        ids = token_ids[-self._most_tokens :]
        for begin in range(0, len(ids), PIECE_TOKENS):
            piece = Piece(salt, array("I", ids[begin : begin + PIECE_TOKENS]))
            if len(piece.token_ids) > self._gram:
                self._waiting.append(piece)
                self._num_waiting += len(piece.token_ids)
        while self._num_waiting > self._most_tokens:
            self._num_waiting -= len(self._waiting.popleft().token_ids)

    def work(self, least: int) -> int:
        """Index outputs that wait: at least so many tokens, if there are, and less than a piece
        more. Forgets as many. Returns how many were indexed."""
        indexed = 0
        while self._waiting and indexed < least:
            piece = self._waiting.popleft()
            size = len(piece.token_ids)
            self._num_waiting -= size
            indexed += size
            while self._num_indexed + size > self._most_tokens:
                self._forget(next(iter(self._pieces)))
            self._index(piece)
        return indexed

    def find(self, salt: str, token_ids: Sequence[int]) -> StoredMatch | None:
        """The longest match of a text's end: of the last occurrences of its last n-gram, those that
        agree with it over most tokens. None without an occurrence."""
        tail = array("I", token_ids[-LONGEST_MATCH:])
        places = self._places.get(salt, {}).get(tail[-self._gram :].tobytes())
        if places is None:
            return None
        longest = self._gram
        best: list[int] = []
        for place in reversed(places):
            number, position = divmod(place, PIECE_TOKENS)
            length = shared_end(self._pieces[number].token_ids, position, tail, longest)
            if length > longest:
                longest, best = length, []
            if length == longest:
                best.append(place)
        return StoredMatch(longest, best)

    def text(self, place: int) -> tuple[Sequence[int], int]:
        """The tokens of a place's piece, and its position in them."""
        number, position = divmod(place, PIECE_TOKENS)
        return self._pieces[number].token_ids, position

    def continuation(self, match: StoredMatch, most: int) -> list[int]:
        """What followed most of the places, `most` tokens at most; of equals the last indexed.

        The matching outputs count as used.
        """
        live = []
        for place in match.places:
            number, position = divmod(place, PIECE_TOKENS)
            self._pieces.move_to_end(number)
            live.append(self._pieces[number].token_ids[position : position + most].tolist())
        found: list[int] = []
        while live.count(live[0]) < len(live):
            votes: dict[int, int] = {}
            for each in live:
                if len(each) > len(found):
                    token = each[len(found)]
                    votes[token] = votes.get(token, 0) + 1
            winner = max(votes, key=votes.__getitem__)
            if votes[winner] < LEAST_SHARE * len(match.places):
                return found
            live = [each for each in live if each[len(found) : len(found) + 1] == [winner]]
            found.append(winner)
        return live[0]

    def _index(self, piece: Piece) -> None:
        places = self._places.setdefault(piece.salt, {})
        number = self._next_number
        self._next_number += 1
        for position, key in self._grams(piece):
            known = places.get(key)
            if known is None:
                known = places[key] = array("Q")
            elif len(known) == MOST_OCCURRENCES:
                del known[0]
            known.append(number * PIECE_TOKENS + position)
        self._pieces[number] = piece
        self._num_indexed += len(piece.token_ids)

    def _forget(self, number: int) -> None:
        piece = self._pieces.pop(number)
        places = self._places[piece.salt]
        for position, key in self._grams(piece):
            known = places.get(key)
            place = number * PIECE_TOKENS + position
            if known is not None and place in known:
                known.remove(place)
                if not known:
                    del places[key]
        if not places:
            del self._places[piece.salt]
        self._num_indexed -= len(piece.token_ids)

    def _grams(self, piece: Piece) -> Iterator[tuple[int, bytes]]:
        """The n-grams that a token follows, and that token's position."""
        ids, gram = piece.token_ids, self._gram
        for position in range(gram, len(ids)):
            yield position, ids[position - gram : position].tobytes()


def shared_end(token_ids: Sequence[int], position: int, tail: Sequence[int], least: int) -> int:
    """How many tokens before `position` are also the last ones of `tail`; 0 if fewer than `least`.

    Both sequences are of one type: what is alike is found by comparing slices.
    """
    most = min(position, len(tail))
    if least > most or token_ids[position - least : position] != tail[-least:]:
        return 0
    if token_ids[position - most : position] == tail[-most:]:
        return most
    length = least
    while token_ids[position - length - 1] == tail[-length - 1]:
        length += 1
    return length
