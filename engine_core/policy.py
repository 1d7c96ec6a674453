"""The order among sequences, as sort keys: first in, and (from the end) first out when room lacks.

A key is fixed when a request is submitted and no two are equal: a preempted sequence returns to its
old place among the waiting, and the first in order is never preempted, so it always progresses. The
keys of later requests grow without bound under every policy but `priority`, so nobody is overtaken
for ever there; under `priority` a low one waits as long as higher ones keep coming, as asked for.
"""

from typing import Literal, Protocol

from triptych.engine_core.ids import SequenceId
from triptych.engine_core.request import Request

PolicyName = Literal["fcfs", "priority", "shortest-prefill", "fair"]
POLICY_NAMES: tuple[PolicyName, ...] = ("fcfs", "priority", "shortest-prefill", "fair")
Key = tuple[float, SequenceId, SequenceId]
"""Rank, first sequence of the request, sequence: those of a request stand together."""


class Policy(Protocol):
    """A strategy. `rank` is called once a request; its choices share the rank."""

    def rank(self, request: Request) -> float:
        """Lower goes first; equal ones in the order in which they came."""
        ...

    def ended(self, request: Request, num_output: int) -> None:
        """A choice of the request is over, after so many output tokens."""
        ...


class Fcfs:
    """First come, first served; priorities are not looked at."""

    def rank(self, request: Request) -> float:
        """All equal."""
        return 0.0

    def ended(self, request: Request, num_output: int) -> None:
        """Nothing to keep."""


class Priority:
    """Lower priority numbers first, as in vLLM; first come, first served among equals."""

    def rank(self, request: Request) -> float:
        """The request's own number."""
        return float(request.priority)

    def ended(self, request: Request, num_output: int) -> None:
        """Nothing to keep."""


class ShortestPrefill:
    """Short prompts first, but only so far: a request's lead shrinks with the work that has come.

    Ranked by own prompt tokens plus a share of all prompt tokens submitted before: a request is
    overtaken by at most PATIENCE times its own length of later work.
    """

    PATIENCE = 8.0

    def __init__(self) -> None:
        self._submitted = 0

    def rank(self, request: Request) -> float:
        """Length, and a share of the work before."""
        rank = len(request.prompt_token_ids) + self._submitted / self.PATIENCE
        self._submitted += len(request.prompt_token_ids)
        return rank

    def ended(self, request: Request, num_output: int) -> None:
        """Nothing to keep."""


class FairShare:
    """Tenants take turns by tokens: start-time fair queueing (Goyal, Vin, Cheng, 1996).

    A request starts, in virtual time, when its tenant's last one ended, or now if that is past. The
    prompt is charged when it is submitted, the output when it is there. What tenants owe that have
    nothing here is forgotten when there are too many of them. Now is where the last request to end
    started, and moves on by each tenant's share of the prompts computed (as in weighted fair
    queueing; Demers, Keshav, Shenker, 1989): else those who always come as somebody new would all
    start at once, and who waits behind them would wait for ever.
    """

    MAX_TENANTS = 4096

    def __init__(self) -> None:
        self._now = 0.0  # virtual
        self._free_at: dict[str, float] = {}  # by tenant
        self._open: dict[str, int] = {}  # choices not ended, by tenant
        self._starts: dict[int, tuple[float, int]] = {}  # by request: start, choices left

    def rank(self, request: Request) -> float:
        """The virtual start."""
        tenant = request.tenant
        start = max(self._now, self._free_at.get(tenant, 0.0))
        self._free_at[tenant] = start + len(request.prompt_token_ids)
        self._open[tenant] = self._open.get(tenant, 0) + request.params.n
        self._starts[request.request_id] = (start, request.params.n)
        return start

    def ended(self, request: Request, num_output: int) -> None:
        """Charge the output."""
        tenant = request.tenant
        self._free_at[tenant] += num_output
        start, left = self._starts.pop(request.request_id)
        if left > 1:
            self._starts[request.request_id] = (start, left - 1)
        # By prompts, because those who wait were ranked by theirs alone; once a request.
        counts = num_output > 0 and left == request.params.n
        computed = len(request.prompt_token_ids) if counts else 0
        self._now = max(self._now + computed / len(self._open), start)
        self._open[tenant] -= 1
        if self._open[tenant] == 0:
            del self._open[tenant]
        if not self._starts:  # idle: nobody waits for what others had
            self._free_at.clear()
        elif len(self._free_at) > self.MAX_TENANTS:
            self._free_at = {each: self._free_at[each] for each in self._open}


def policy_of(name: PolicyName) -> Policy:
    """The strategy of that name."""
    policies: dict[PolicyName, type[Policy]] = {
        "fcfs": Fcfs,
        "priority": Priority,
        "shortest-prefill": ShortestPrefill,
        "fair": FairShare,
    }
    return policies[name]()
