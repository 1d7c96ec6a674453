"""Who gets how much of a step: tokens, rows of logits and blocks, for the running sequences.

First everybody's own tokens. Drafts, which nobody needs, get of what is left.
"""

from array import array
from collections.abc import Mapping

from triptych.engine_core.block_tables import BlockTables
from triptych.engine_core.ids import SequenceId
from triptych.engine_core.planned_step import PlannedStep
from triptych.engine_core.running import RunningSequence
from triptych.engine_core.running_order import RunningOrder


def plan_step(
    order: RunningOrder,
    guesses: Mapping[SequenceId, "array[int]"],
    tables: BlockTables,
    budget: int,
    most_per_sequence: int,
    logits_budget: int,
) -> PlannedStep | None:
    """Rows for all that lack tokens, with their blocks; None if blocks lack.

    Tokens and logits beyond one each go to the first in order, then to the first drafts in order.
    Where blocks lack, those who have got theirs by then keep them.
    """
    lacking = [sequence for sequence in order if sequence.num_lacking]
    spare = max(0, budget - len(lacking))
    step = PlannedStep(most_per_sequence, max(0, logits_budget - len(order)), is_planned=True)
    shares = []
    for sequence in lacking:
        wanted = 1 + min(sequence.num_lacking - 1, spare, most_per_sequence - 1)
        num_tokens = sequence.fitting(wanted, 1 + step.logits_left)
        if not prepare(tables, sequence, num_tokens):
            return None
        step.logits_left -= max(0, sequence.num_logits(num_tokens) - 1)
        spare -= num_tokens - 1
        shares.append((sequence, num_tokens))
    for sequence, num_tokens in shares:
        drafts = array("i")
        if sequence.sequence_id in guesses and num_tokens == sequence.num_lacking:
            wished = guesses[sequence.sequence_id][: min(spare, step.logits_left)]
            drafts = _fitting_drafts(tables, sequence, wished)
        step.add(sequence, num_tokens, drafts)
        step.logits_left -= len(drafts)
        spare -= len(drafts)
    return step


def prepare(tables: BlockTables, sequence: RunningSequence, num_tokens: int) -> bool:
    """Blocks to write the next `num_tokens` tokens to; False, and nothing taken, if they lack."""
    start = sequence.num_computed
    return tables.prepare(sequence.table, sequence.num_tokens, start, start + num_tokens)


def _fitting_drafts(
    tables: BlockTables, sequence: RunningSequence, guesses: "array[int]"
) -> "array[int]":
    """The first of `guesses`, as many as it may get beside the token that is drawn anyway, and as
    blocks can be had for.

    Its table ends with its own last token, in a block that is its alone by now: a draft never comes
    to stand in a shared one.
    """
    num_tokens = sequence.num_tokens
    most = max(0, sequence.most_tokens - num_tokens - 1)
    end = tables.extend(sequence.table, num_tokens + min(len(guesses), most))
    return guesses[: end - num_tokens]
