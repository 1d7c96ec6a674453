"""The rows of a step that is planned while the one before it is in flight.

By then that one's own tokens are computed, and one token more is known of each sequence that
samples in it: nobody here knows which, but the executor, which draws it, puts it in. So each
sequence gets what it would get after that step, unless

* the token is not the executor's to know (`host_drawn`, or there are drafts behind it),
* the sequence ends with it, whatever it is, or is held,
* it has no row in that step but a block that the step fills by a copy or a load: should that step
  fail, this one would read what was never there.
"""

from collections.abc import Collection
from typing import NamedTuple

from triptych.engine_core.block_tables import BlockTables
from triptych.engine_core.planned_step import PlannedStep
from triptych.engine_core.running import RunningSequence
from triptych.engine_core.running_order import RunningOrder


class Outlook(NamedTuple):
    """Where a sequence stands when the step in flight is over: `passed` tokens further, and lacking
    `num_lacking`. `previous`: see planned_step.Row."""

    sequence: RunningSequence
    passed: int
    num_lacking: int
    previous: int

    @property
    def num_tokens(self) -> int:
        """All that it has by then."""
        return self.sequence.num_computed + self.passed + self.num_lacking


class Share(NamedTuple):
    """What it gets of the step ahead."""

    outlook: Outlook
    num_tokens: int

    def span(self) -> tuple[int, int, int]:
        """The sequence's tokens by then, and which of them the step computes."""
        start = self.outlook.sequence.num_computed + self.outlook.passed
        return self.outlook.num_tokens, start, start + self.num_tokens


def plan_step_ahead(
    order: RunningOrder,
    step: PlannedStep,
    tables: BlockTables,
    host_drawn: Collection[int],
    budgets: tuple[int, int, int],
) -> PlannedStep | None:
    """Rows behind those of `step`, with their blocks; None, and nothing taken, if nobody gets one
    or blocks lack. Two who share a block count both, as if each had to copy it.

    `budgets`: of tokens, tokens of one sequence, and rows of logits, as in `Batch.plan`.
    """
    budget, most_per_sequence, logits_budget = budgets
    first_samples = _first_samples(step)
    outlooks = []
    for sequence in order:
        outlook = _outlook(sequence, step, first_samples, host_drawn)
        if outlook is not None and (outlook.passed or not tables.awaits(sequence.table)):
            outlooks.append(outlook)
    spare = max(0, budget - len(outlooks))
    ahead = PlannedStep(most_per_sequence, max(0, logits_budget - len(order)), is_ahead=True)
    shares: list[Share] = []
    for outlook in outlooks:
        sequence, passed = outlook.sequence, outlook.passed
        num_tokens = num_logits = 1
        if outlook.previous < 0:
            wanted = 1 + min(outlook.num_lacking - 1, spare, most_per_sequence - 1)
            num_tokens = sequence.fitting(wanted, 1 + ahead.logits_left, passed)
            num_logits = sequence.num_logits(num_tokens, passed)
        ahead.logits_left -= max(0, num_logits - 1)
        spare -= num_tokens - 1
        shares.append(Share(outlook, num_tokens))
    wanted = sum(tables.num_wanted(each.outlook.sequence.table, *each.span()) for each in shares)
    if not shares or wanted > tables.pool.num_free:
        return None
    for share in shares:
        sequence, passed, _, previous = share.outlook
        prepared = tables.prepare(sequence.table, *share.span())
        assert prepared, "plan_ahead: blocks were counted"
        ahead.add(sequence, share.num_tokens, passed=passed, previous=previous)
    return ahead


def _first_samples(step: PlannedStep) -> dict[RunningSequence, int]:
    found, first = {}, 0
    for sequence, row in step.samplers():
        found[sequence] = first
        first += row.num_samples
    return found


def _outlook(
    sequence: RunningSequence,
    step: PlannedStep,
    first_samples: dict[RunningSequence, int],
    host_drawn: Collection[int],
) -> Outlook | None:
    if sequence.rules.held:
        return None
    row = step.row_of(sequence)
    passed = 0 if row is None else row.num_tokens
    if sequence not in first_samples:
        return Outlook(sequence, passed, sequence.num_lacking - passed, -1)
    ends = sequence.num_tokens + 1 >= sequence.most_tokens
    if ends or (row is not None and row.drafts) or sequence.sequence_id in host_drawn:
        return None
    return Outlook(sequence, passed, 1, first_samples[sequence])
