"""Compiled grammars: those that live choices need, and as many others as the settings allow.

Matchers of one grammar share the states of its lexer, which are made as texts need them. So a
grammar that is used a lot would wear out: at the bound it is compiled anew (`renewed`).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triptych.engine_core.errors import InvalidRequest, RequestError, Unavailable
from triptych.engine_core.ids import RequestId
from triptych.services.scheduler.grammar_compiler import (
    FIELD,
    Compiled,
    GrammarCompiler,
    VocabularyTables,
)
from triptych.services.transport.vocabulary import Vocabulary

if TYPE_CHECKING:  # loaded with the first grammar
    from llguidance import LLMatcher

_SLACK = 32
_LONGEST_RENEWAL = 0.05
"""Seconds. A grammar that took longer to compile is not compiled again by the step loop."""


@dataclass(slots=True)
class _Entry:
    """`worn`: its states have met their bound, so it is not worth keeping."""

    matcher: "LLMatcher"
    seconds: float
    worn: bool = False


class Grammars:
    """The GrammarSource of a scheduler process. Used by the loop's thread only."""

    def __init__(self, compiler: GrammarCompiler, most: int, most_bytes: int) -> None:
        """Beside those in use, at most `most` grammars of `most_bytes` of text together stay."""
        self._compiler = compiler
        self._most = most
        self._most_bytes = most_bytes
        self._tables: VocabularyTables | None = None
        self._held: dict[str, set[RequestId]] = {}  # by choices that have not ended
        self._ready: dict[str, _Entry] = {}  # of those held
        self._idle: OrderedDict[str, _Entry] = OrderedDict()  # the longest unused first
        self._idle_bytes = 0
        self._crowd = _SLACK
        self.compiled_total = 0
        self.hits_total = 0
        self.compile_seconds_total = 0.0

    def __len__(self) -> int:
        return len(self._ready) + len(self._idle)

    # ------------------------------------------------------------------ coming and going

    def learn(self, vocabulary: Vocabulary) -> None:
        """What tokens there are; the first word counts."""
        if self._tables is None:
            self._tables = VocabularyTables(vocabulary)

    def ask(self, grammar: str, request_ids: Iterable[RequestId]) -> bool:
        """Keep a grammar for these choices, until `prune` finds that none of them lives.

        False: it is being compiled, and comes with `take`. Raises InvalidRequest before the
        vocabulary is known.
        """
        if self._tables is None:
            raise InvalidRequest(FIELD, "the tokenizer has not told its vocabulary")
        self._held.setdefault(grammar, set()).update(request_ids)
        if grammar in self._idle:
            self._ready[grammar] = self._idle.pop(grammar)
            self._idle_bytes -= len(grammar.encode())
        if grammar in self._ready:
            self.hits_total += 1
            return True
        self._compiler.begin(self._tables, grammar)
        return False

    def forget(self, grammar: str) -> None:
        """Nobody waits for it to compile any more."""
        self._compiler.forget(grammar)

    def take(self) -> list[Compiled]:
        """What has been compiled, or has failed to, since the last call."""
        compiled = self._compiler.take()
        for each in compiled:
            self.compile_seconds_total += each.seconds
            if isinstance(each.outcome, RequestError):
                self._held.pop(each.grammar, None)
                continue
            assert each.outcome is not None, "what was not begun is not taken"
            self.compiled_total += 1
            entry = _Entry(each.outcome, each.seconds)
            if each.grammar in self._held:
                self._ready[each.grammar] = entry
            else:
                self._rest(each.grammar, entry)
        return compiled

    @property
    def crowded(self) -> bool:
        """Whether so many are held that it is time to `prune`: twice as many as were needed."""
        return len(self._held) > self._crowd

    def prune(self, lives: Callable[[RequestId], bool]) -> None:
        """Let go of what only choices that have ended were using."""
        for grammar, request_ids in list(self._held.items()):
            request_ids -= {each for each in request_ids if not lives(each)}
            if request_ids:
                continue
            del self._held[grammar]
            entry = self._ready.pop(grammar, None)
            if entry is not None and not entry.worn:
                self._rest(grammar, entry)
        self._crowd = 2 * len(self._held) + _SLACK

    def _rest(self, grammar: str, entry: _Entry) -> None:
        self._idle[grammar] = entry
        self._idle_bytes += len(grammar.encode())
        while len(self._idle) > self._most or self._idle_bytes > self._most_bytes:
            evicted, _ = self._idle.popitem(last=False)
            self._idle_bytes -= len(evicted.encode())

    # ------------------------------------------------------------------ GrammarSource

    def matcher(self, grammar: str) -> "LLMatcher":
        """A matcher at its beginning, the caller's own. Raises Unavailable where it is not held."""
        return self._entry(grammar).matcher.deep_copy()

    def renewed(self, grammar: str) -> "LLMatcher":
        """The same, its lexer without states: when a matcher has met the bound of them.

        Compiles, now. Raises InvalidRequest for a grammar that takes too long for that.
        """
        assert self._tables is not None, "there are matchers"
        entry = self._entry(grammar)
        if entry.seconds > _LONGEST_RENEWAL:
            raise InvalidRequest(FIELD, "its text takes more lexer states than a grammar may have")
        entry.matcher = self._tables.compile(grammar)
        entry.worn = True
        self.compiled_total += 1
        return entry.matcher.deep_copy()

    def _entry(self, grammar: str) -> _Entry:
        entry = self._ready.get(grammar)
        if entry is None:
            raise Unavailable("the grammar is not compiled")
        return entry

    def greedy_tokens(self, text: bytes) -> list[int]:
        """Tokens that have these bytes, as far as they are whole characters; longest first."""
        assert self._tables is not None, "there are matchers"
        return self._tables.greedy_tokens(text)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token is in the middle of a text."""
        assert self._tables is not None, "there are matchers"
        return self._tables.tokens[token_id]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that a matcher takes for the end of the output."""
        return self._tables.eos_token_ids if self._tables is not None else ()

    @property
    def vocabulary_size(self) -> int:
        """How many tokens there are; 0 before a tokenizer has told its vocabulary."""
        return len(self._tables.tokens) if self._tables is not None else 0
