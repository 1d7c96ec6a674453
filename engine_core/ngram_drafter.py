"""Prompt lookup: what followed when a sequence's last tokens stood in its text before.

The method of Saxena 2023 ("Prompt Lookup Decoding") and of vLLM's `ngram`: answers repeat what they
are asked about (quotes, code, names), so the continuation of an earlier occurrence is a good guess,
and finding it costs no model.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

INDEXED_PER_STEP = 2048
"""Positions that are indexed in one step, at most: a long prompt is not to hold up all others."""
MOST_INDEXED = 1 << 18
"""Positions that are indexed at once, of all sequences: some 100 MB with n-grams of three sizes."""
_FEW = 8
"""So many positions are indexed faster one by one."""


class Occurrence(NamedTuple):
    """The `length` tokens before `position` are the text's last ones."""

    position: int
    length: int


class NgramIndex:
    """A text, and where its n-grams of `shortest` to `longest` tokens occurred last.

    The index covers a beginning of the text, all of it but the last token once `extend` has caught
    up: then an n-gram is indexed as soon as a token follows it. `num_indexed` is how many tokens
    have an n-gram before them that was looked at. Nothing in it is an object that Python's garbage
    collector visits: with as many n-grams that takes tens of milliseconds.
    """

    __slots__ = ("_ends", "_longest", "_shortest", "num_indexed", "token_ids")

    def __init__(self, token_ids: Iterable[int], shortest: int, longest: int) -> None:
        self.token_ids = array("I", token_ids)
        self.num_indexed = 0
        self._shortest = shortest
        self._longest = longest
        self._ends: dict[bytes, int] = {}

    def extend(self, most: int) -> int:
        """Index at most `most` further positions; returns how many. O(that)."""
        ids, begin = self.token_ids, self.num_indexed
        end = min(begin + most, len(ids) - 1)
        if end <= begin:
            return 0
        if end - begin <= _FEW:
            for position in range(begin + 1, end + 1):
                for size in range(self._shortest, min(self._longest, position) + 1):
                    self._ends[ids[position - size : position].tobytes()] = position
        else:
            self._extend_at_once(begin, end)
        self.num_indexed = end
        return end - begin

    def _extend_at_once(self, begin: int, end: int) -> None:
        # The loops run inside of map and dict: several times as fast as a loop over positions.
        width = self.token_ids.itemsize
        for size in range(self._shortest, self._longest + 1):
            first = max(begin + 1, size)
            text = self.token_ids[first - size : end].tobytes()
            starts = range(0, len(text) - (size - 1) * width, width)
            ends = range(size * width, len(text) + width, width)
            grams = map(text.__getitem__, map(slice, starts, ends))
            self._ends.update(zip(grams, range(first, end + 1), strict=True))

    def find(self) -> Occurrence | None:
        """The latest indexed occurrence of the longest of the text's last n-grams that has one."""
        ids = self.token_ids
        for size in range(min(self._longest, len(ids)), self._shortest - 1, -1):
            position = self._ends.get(ids[-size:].tobytes())
            if position is not None:
                return Occurrence(position, size)
        return None

    def continuation(self, position: int, most: int) -> list[int]:
        """`most` tokens from `position` on. Where the text ends among them, they are those of text
        and continuation together: a text that repeats itself is taken to go on doing so."""
        found = self.token_ids[position : position + most].tolist()
        for i in range(most - len(found)):
            found.append(found[i])
        return found


class NgramDrafter:
    """A Guesser by prompt lookup: n-grams of `shortest` to `longest` tokens, longest first.

    Of equal n-grams the latest counts. Text is indexed when a guess is asked for, INDEXED_PER_STEP
    positions a step and MOST_INDEXED in all: of what lies beyond nothing is found, until others
    close.
    """

    def __init__(
        self,
        shortest: int,
        longest: int,
        *,
        indexed_per_step: int = INDEXED_PER_STEP,
        most_indexed: int = MOST_INDEXED,
    ) -> None:
        self._shortest = shortest
        self._longest = longest
        self._indexed_per_step = indexed_per_step
        self._allowance = indexed_per_step
        self._room = most_indexed
        self._most_indexed = most_indexed
        self._texts: dict[int, NgramIndex] = {}

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def num_indexed(self) -> int:
        """Indexed positions of all texts."""
        return self._most_indexed - self._room

    def open(
        self, sequence_id: int, prompt_ids: Sequence[int], output_ids: Sequence[int], salt: str
    ) -> None:
        """Look its text up from now on. A text serves its own sequence alone, whatever the salt."""
        self.close(sequence_id)
        text = chain(prompt_ids, output_ids)
        self._texts[sequence_id] = NgramIndex(text, self._shortest, self._longest)

    def append(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """One more token for each."""
        self._allowance = self._indexed_per_step
        for sequence_id, token_id in zip(sequence_ids, token_ids, strict=True):
            text = self._texts.get(sequence_id)
            if text is not None:
                text.token_ids.append(token_id)

    def close(self, sequence_id: int) -> None:
        """Forget a text."""
        text = self._texts.pop(sequence_id, None)
        if text is not None:
            self._room += text.num_indexed

    def token_ids(self, sequence_id: int) -> Sequence[int]:
        """The text of an open sequence. KeyError for one that is not."""
        return self._texts[sequence_id].token_ids

    def text(self, sequence_id: int) -> NgramIndex | None:
        """A sequence's text, indexed as far as this step's work goes; None if it is not open."""
        text = self._texts.get(sequence_id)
        if text is not None:
            indexed = text.extend(min(self._allowance, self._room))
            self._allowance -= indexed
            self._room -= indexed
        return text

    def guess(self, sequence_id: int, most: int) -> Sequence[int]:
        """What followed the latest occurrence of the text's last tokens."""
        text = self.text(sequence_id)
        found = text.find() if text is not None else None
        if text is None or found is None:
            return ()
        return text.continuation(found.position, most)
