"""What the tokenizer process counts."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the process started. Written on the event loop only."""

    requests_total: int = 0
    responses_total: int = 0
    tokens_total: int = 0
    drains_total: int = 0
    drain_seconds_total: float = 0.0
    schedulers_lost_total: int = 0
    choices_resubmitted_total: int = 0
