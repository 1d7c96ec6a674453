"""Who may have killed the executor: found out by running suspects one at a time.

Nobody can tell whether an executor died of what it computed or of something outside. So a death
makes suspects of all choices whose rows were in the step, and ends none. From then on

* one suspect runs at a time, beside others that are not suspected, until its next token is drawn:
  that clears it. (A prompt in several chunks is on trial to the last of them.)
* If the executor dies with one suspect in the step, or with one choice and nothing else, that one
  has a strike. It is tried before everybody else and alone; dies the executor again, it is fatal.
  A drawn token takes the strike away.

So a choice that kills by itself ends at the third death, at the second one if it was alone, and
takes nobody along; a death from outside ends nobody, unless a second one hits the very step of one
who was struck by the first.

What has a token of its own stands trial by itself. What is computed for several choices does so for
all of them: the prompt of those that have no token yet, and a beam search.
"""

from collections.abc import Collection, Iterable

from triptych.engine_core.beams import BeamGroup, BeamGroups
from triptych.engine_core.ids import RequestId, SequenceId
from triptych.engine_core.roster import Roster
from triptych.engine_core.sequence import ChoiceGroup, Sequence

_FATAL = 2
"""Strikes that end a choice."""

Unit = Sequence | ChoiceGroup | BeamGroup
"""What stands trial: a choice, those of a request that have no token yet, or a search."""


class Suspects:
    """The suspected choices and their strikes. By id, so that they outlive a core: hand the same
    object to the next one, which goes on with the same choices."""

    def __init__(self) -> None:
        self._strikes: dict[RequestId, int] = {}
        self.fatal_total = 0  # choices that ended with FatalRequest

    def __len__(self) -> int:
        return len(self._strikes)

    @property
    def any_struck(self) -> bool:
        """Whether somebody has a strike: who is tried before all others."""
        return any(self._strikes.values())

    def strikes(self, request_ids: Iterable[RequestId]) -> int:
        """The most that one of them has; -1 if none of them is suspected."""
        return max((self._strikes.get(each, -1) for each in request_ids), default=-1)

    def accuse(self, request_ids: Iterable[RequestId], strikes: int) -> None:
        """Suspected from now on, with so many strikes."""
        self._strikes.update(dict.fromkeys(request_ids, strikes))

    def clear(self, request_ids: Iterable[RequestId]) -> None:
        """They are not suspected, any more or at all."""
        for request_id in request_ids:
            self._strikes.pop(request_id, None)

    def request_ids(self) -> set[RequestId]:
        """All. For tests."""
        return set(self._strikes)


class Trials:
    """The suspects among the sequences of one core, and which of them may start."""

    def __init__(self, suspects: Suspects, roster: Roster, beams: BeamGroups) -> None:
        self._suspects = suspects
        self._roster = roster
        self._beams = beams
        self._tried: Unit | None = None
        self.alone = False

    def open(self) -> None:
        """Before waiting sequences are looked through: see who is on trial. Costs a look at each
        that runs. `alone`: nobody else may start."""
        suspected = (each for each in self._roster.running if self._strikes(each) >= 0)
        first = next(suspected, None)
        self._tried = None if first is None else self._unit(first)
        self.alone = self._suspects.any_struck

    def bars(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence must not start now."""
        strikes = self._strikes(sequence)
        if strikes < int(self.alone):
            return self.alone
        return self._tried is not None and self._tried is not self._unit(sequence)

    def start(self, sequence: Sequence) -> None:
        """One that was not barred runs."""
        if self._strikes(sequence) >= 0:
            self._tried = self._unit(sequence)

    def drawn(self, sequence_ids: Iterable[int]) -> None:
        """These have got a token. Before their choices are noted as started: the first token clears
        those too that wait for the same prompt."""
        for sequence_id in sequence_ids:
            sequence = self._roster.by_id.get(SequenceId(sequence_id))
            if sequence is not None and not sequence.is_beam:
                self._suspects.clear((sequence.request_id, *_members(self._unit(sequence))))

    def died(self, rows: Iterable[Sequence | None]) -> list[Sequence]:
        """An executor died computing these; None for one that had been aborted. All wait by now.
        Returns the sequences of what is fatal."""
        units = dict.fromkeys(map(self._unit_of_row, rows))
        strikes = {unit: self._suspects.strikes(_members(unit)) for unit in units}
        suspected = [unit for unit, count in strikes.items() if count >= 0]
        for unit, before in strikes.items():
            count = max(before, 0)
            if len(units) == 1:
                count += 1
            elif suspected == [unit]:
                count = 1  # never the second one: a verdict must be certain
            self._suspects.accuse(_members(unit), count)
            if count >= _FATAL:
                return _sequences(unit)
        return []

    def _unit_of_row(self, sequence: Sequence | None) -> Unit | None:
        return None if sequence is None else self._unit(sequence)

    def _unit(self, sequence: Sequence) -> Unit:
        if sequence.is_beam:
            return self._beams.group_of(sequence)
        if sequence.started or sequence.group is None:
            return sequence
        return sequence.group

    def _strikes(self, sequence: Sequence) -> int:
        """-1: not suspected."""
        own = (sequence.request_id,)
        return self._suspects.strikes(_members(self._unit(sequence)) if sequence.is_beam else own)

    def check(self) -> None:
        """Assert that one suspect runs at most. For tests."""
        running = self._roster.running
        tried = {self._unit(each) for each in running if self._strikes(each) >= 0}
        assert len(tried) <= 1, "one suspect runs at a time"


def _members(unit: Unit | None) -> Collection[RequestId]:
    """The choices that it is computed for. Of a prompt, while it is computed, those that wait."""
    match unit:
        case None:
            return ()
        case Sequence():
            return (unit.request_id,)
        case ChoiceGroup():
            return [each.request_id for each in unit.waiting]
        case BeamGroup():
            return unit.wanted


def _sequences(unit: Unit | None) -> list[Sequence]:
    match unit:
        case None:
            return []
        case Sequence():
            return [unit]
        case ChoiceGroup():
            return unit.waiting.copy()
        case BeamGroup():
            return unit.sequences.copy()
