"""Requests that wait for their grammar to compile, outside the core: nothing of them runs yet.

They come in at Submit and leave when their grammar is there or has failed. Their choices can be
aborted before, one by one; whoever ends the last choice of a request ends the request.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from triptych.engine_core.errors import RequestError
from triptych.engine_core.ids import RequestId
from triptych.services.scheduler.grammars import Grammars
from triptych.services.scheduler.tokenizer_link import Submitted


def choices_of(submitted: Submitted) -> list[RequestId]:
    """How the choices of a request are known."""
    request = submitted.request
    first = request.request_id
    return [RequestId(each) for each in range(first, first + request.params.n)]


@dataclass(slots=True)
class _Waiting:
    submitted: Submitted
    gone: list[RequestId] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Released:
    """A request that waits no more. `gone`: choices that were aborted meanwhile, not all of them.
    `error`: why it has no grammar."""

    submitted: Submitted
    gone: list[RequestId]
    error: RequestError | None

    def choices(self) -> list[RequestId]:
        """Those that somebody waits for."""
        return [each for each in choices_of(self.submitted) if each not in self.gone]


class GrammarQueue:
    """Used by the loop's thread only. Bounded by whoever adds."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._by_grammar: dict[str, list[_Waiting]] = {}
        self._by_choice: dict[RequestId, _Waiting] = {}

    @property
    def num_choices(self) -> int:
        """Choices that wait."""
        return len(self._by_choice)

    @property
    def num_requests(self) -> int:
        """Requests that wait."""
        return sum(map(len, self._by_grammar.values()))

    def add(self, submitted: Submitted) -> None:
        """A request whose grammar is being compiled (Grammars.ask)."""
        waiting = _Waiting(submitted)
        self._by_grammar.setdefault(submitted.request.params.grammar, []).append(waiting)
        for request_id in choices_of(submitted):
            assert request_id not in self._by_choice, f"{request_id} waits already"
            self._by_choice[request_id] = waiting

    def lives(self, request_id: RequestId) -> bool:
        """Whether the choice waits here."""
        return request_id in self._by_choice

    def abort(self, request_id: RequestId) -> bool:
        """End a choice; False if it does not wait here."""
        waiting = self._by_choice.pop(request_id, None)
        if waiting is None:
            return False
        waiting.gone.append(request_id)
        if len(waiting.gone) == waiting.submitted.request.params.n:
            grammar = waiting.submitted.request.params.grammar
            others = self._by_grammar[grammar]
            others[:] = [each for each in others if each is not waiting]
            if not others:
                del self._by_grammar[grammar]
                self._grammars.forget(grammar)
        return True

    def release(self) -> Iterator[Released]:
        """The requests whose grammars have been compiled, or have failed to."""
        for compiled in self._grammars.take():
            error = compiled.outcome if isinstance(compiled.outcome, RequestError) else None
            yield from self._released(self._by_grammar.pop(compiled.grammar, ()), error)

    def _released(
        self, waiting: Iterable[_Waiting], error: RequestError | None
    ) -> Iterator[Released]:
        for each in waiting:
            for request_id in choices_of(each.submitted):
                self._by_choice.pop(request_id, None)
            yield Released(each.submitted, each.gone, error)
