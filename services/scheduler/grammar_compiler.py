"""Grammars to matchers, on threads beside the step loop: llguidance over a vocabulary.

What a client asks for has been tried out in the tokenizer process before (time, memory, keywords).
Here compiling costs the step loop nothing: llguidance lets go of the interpreter lock meanwhile.
Only the vocabulary's own tables, made once for all grammars, hold it (measured: 0.2 s for 49,152
tokens), so they are made in two parts, when the first grammar comes.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

from triptych.engine_core.errors import InvalidRequest, RequestError
from triptych.services.transport.vocabulary import Vocabulary

if TYPE_CHECKING:  # loaded with the first grammar
    from llguidance import LLMatcher, LLTokenizer

FIELD = "structured_output"
_NUM_THREADS = 2
"""One grammar that takes long does not keep all others waiting."""
_LONGEST_TOKEN = 255
"""Bytes of the longest token that llguidance's trie takes; longer ones never match."""
_LONGEST_REASON = 300

_LETTERS = r"[ A-Za-z]{1,30}"
"""As a slice it makes masks of regexes over letters 20 times cheaper, others no dearer."""

_ROOT = "root-of-all"
_FREE = '%llguidance {"no_forcing": true}\nstart: @'
"""Where text must follow, any tokens of it may: else llguidance lets only its own cut through, and
a model would meet text in a cut that it has never seen."""


def unforced(grammar: str) -> str:
    """The grammar with every tokenization of its texts. Raises InvalidRequest for what is not in
    llguidance's JSON form, {"grammars": [...], ...}; its numbers and texts stay as they are."""
    try:
        form = json.loads(grammar)
        names = [str(part.get("name") or "") for part in form["grammars"]]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        names, form = [], {}
    if not names or next(iter(form)) != "grammars":
        raise InvalidRequest(FIELD, "the grammar is not in llguidance's JSON form")
    outer = json.dumps({"lark_grammar": _FREE + (names[0] or _ROOT)})
    before, parts = grammar.split("[", 1)  # the list of grammars, which stands first
    if not names[0]:
        parts = parts.replace("{", f'{{"name": "{_ROOT}",', 1)
    return f"{before}[{outer},{parts}"


def grammar_error(matcher: "LLMatcher") -> InvalidRequest:
    """Why a matcher does not work, in one line."""
    lines = matcher.get_error().strip().splitlines() or ["unknown reason"]
    return InvalidRequest(FIELD, f"the grammar does not compile: {lines[0][:_LONGEST_REASON]}")


class VocabularyTables:
    """The vocabulary as llguidance wants it: a TokenizerWrapper, and the LLTokenizer made of it."""

    is_tokenizer_wrapper = True  # the name by which llguidance knows one

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = [
            token if len(token) <= _LONGEST_TOKEN else b"" for token in vocabulary.tokens
        ]
        self.special_token_ids = list(vocabulary.special_token_ids)
        self.eos_token_id = vocabulary.eos_token_ids[0] if vocabulary.eos_token_ids else 0
        self.bos_token_id = None
        self.eos_token_ids = vocabulary.eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._making = threading.Lock()

    def __call__(self, text: str | bytes) -> list[int]:
        """How llguidance tokenizes text that must follow: any way that has these bytes will do."""
        if self._tokenizer is None:  # it tries whether it can be called, before it is made
            return []
        return self._tokenizer.greedy_tokenize(text if isinstance(text, str) else text.decode())

    def tokenizer(self) -> "LLTokenizer":
        """The tables, made at the first call. Any thread."""
        from llguidance import LLTokenizer

        with self._making:
            if self._tokenizer is None:
                ends = list(self.eos_token_ids)
                # Annotated as a class of its own, of which only these five names are used.
                plain = LLTokenizer(self, eos_token=ends, slices=[])  # type: ignore[arg-type]  # duck-typed
                self._tokenizer = plain.with_slices([_LETTERS, *LLTokenizer.general_slices()])
            return self._tokenizer

    def greedy_tokens(self, text: bytes) -> list[int]:
        """Tokens of the text, longest first, as far as it is whole characters."""
        try:
            whole = text.decode()
        except UnicodeDecodeError as error:
            whole = text[: error.start].decode()
        return self.tokenizer().greedy_tokenize(whole)

    def compile(self, grammar: str) -> "LLMatcher":
        """A matcher at its beginning. Raises InvalidRequest. Any thread."""
        from llguidance import LLMatcher

        from triptych.services.transport.grammar_limits import grammar_limits

        if not self.eos_token_ids:
            raise InvalidRequest(FIELD, "the model's tokenizer has no end-of-sequence token")
        matcher = LLMatcher(
            self.tokenizer(), unforced(grammar), log_level=0, limits=grammar_limits()
        )
        if matcher.is_error():
            raise grammar_error(matcher)
        return matcher


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came of a grammar; None: nobody waited, so it was not begun. `seconds`: of CPU."""

    grammar: str
    outcome: "LLMatcher | RequestError | None"
    seconds: float


@dataclass(slots=True)
class _Job:
    tables: VocabularyTables
    grammar: str
    wanted: bool = True


@dataclass(slots=True)
class _Board:
    """What the threads share with the loop: whose jobs these are, and what is done."""

    done: deque[Compiled] = field(default_factory=deque)
    jobs: SimpleQueue[_Job | None] = field(default_factory=SimpleQueue)


class GrammarCompiler:
    """Compiles on threads that begin with the first grammar and end with the process."""

    def __init__(self, wake: Callable[[], object]) -> None:
        """`wake`: called by a thread when something is done."""
        self._wake = wake
        self._board = _Board()
        self._pending: dict[str, _Job] = {}
        self._threads: list[threading.Thread] = []

    def begin(self, tables: VocabularyTables, grammar: str) -> None:
        """Compile a grammar, once for all that ask until it is taken."""
        if grammar in self._pending:
            self._pending[grammar].wanted = True
            return
        while len(self._threads) < _NUM_THREADS:
            # Daemons: no compilation keeps a process that ends.
            thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            self._threads.append(thread)
            thread.start()
        job = self._pending[grammar] = _Job(tables, grammar)
        self._board.jobs.put(job)

    def forget(self, grammar: str) -> None:
        """Nobody waits for it any more: not begun if it has not begun yet."""
        if grammar in self._pending:
            self._pending[grammar].wanted = False

    def take(self) -> list[Compiled]:
        """What has been done since the last call; each has an outcome."""
        taken = []
        while self._board.done:
            compiled = self._board.done.popleft()
            job = self._pending.pop(compiled.grammar)
            if compiled.outcome is None:
                if job.wanted:  # asked for again, between being left out and being taken
                    self.begin(job.tables, compiled.grammar)
                continue
            taken.append(compiled)
        return taken

    def close(self) -> None:
        """No more will be done; what is being compiled is left to end by itself."""
        for _ in self._threads:
            self._board.jobs.put(None)

    def _work(self) -> None:
        while (job := self._board.jobs.get()) is not None:
            self._board.done.append(_compile(job))
            self._wake()


def _compile(job: _Job) -> Compiled:
    if not job.wanted:
        return Compiled(job.grammar, None, 0.0)
    began = time.thread_time()  # whatever else the machine does
    outcome: LLMatcher | RequestError
    try:
        outcome = job.tables.compile(job.grammar)
    except RequestError as error:
        outcome = error
    except BaseException as error:  # the top of the thread: a panic of foreign code is one
        reason = f"the grammar does not compile ({type(error).__name__})"
        outcome = InvalidRequest(FIELD, reason)
    return Compiled(job.grammar, outcome, time.thread_time() - began)
