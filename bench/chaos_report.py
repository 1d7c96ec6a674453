"""What `make chaos` found: every stream judged, each fault with all that it takes to see it again,
and the figures."""

import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from chaos_killer import STAGES
from chaos_ledger import FAULTS, Behaviour, Heard, Judgement, Ledger, Outage, Verdict, judge
from chaos_load import Stream
from chaos_pauses import Kill, pauses, serving_in_silence
from results import Results
from workload import percentile

KILLS, STREAMS, EXECUTOR_PAUSE = 100, 1000, 2.0
RECONNECTING = 0.5
"""Seconds after which a client's connection, which tries again now and then, has found a tokenizer
process that is back."""
_SHOWN = 20


@dataclass(slots=True)
class Seen:
    """Everything that happened in a run. `started`: what its time line counts from.

    `answers`: of the undisturbed run, by number. `health`: when it was asked, and whether it said
    SERVING. `wrong`: whatever is not as it was, in words.
    """

    started: float
    answers: dict[int, Heard] = field(default_factory=dict)
    streams: list[Stream] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    health: list[tuple[float, bool]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """Judges a run and says what it found."""

    seen: Seen
    silence_bound: float
    ledger: Ledger = field(default_factory=Ledger)
    faults: list[tuple[Stream, Judgement]] = field(default_factory=list)

    def judge_all(self) -> None:
        """Compare every stream."""
        outages = [Outage(each.start, each.end + RECONNECTING) for each in self.seen.outages]
        for stream in self.seen.streams:
            expected = self.seen.answers[stream.ask.number]
            judgement = judge(expected, stream.heard, stream.plan.behaviour, outages)
            self.ledger.add(stream.heard, judgement)
            if judgement.fault:
                self.faults.append((stream, judgement))
        print(f"    {self.ledger.line()}", flush=True)
        for stream, judgement in self.faults[:_SHOWN]:
            self._show(stream, judgement)
        for each in self.seen.wrong:
            print(f"WRONG: {each}", flush=True)

    def _show(self, stream: Stream, judgement: Judgement) -> None:
        heard, start = stream.heard, self.seen.started
        span = f"from {heard.sent - start:.3f} to {heard.over - start:.3f} s"
        print(f"{judgement.verdict.upper()}: {judgement.why}")
        print(f"  {stream.ask.line()}\n  {stream.plan}, {span}")
        for name, each in (("expected", self.seen.answers[stream.ask.number]), ("heard", heard)):
            for index, choice in sorted(each.choices.items()):
                print(f"  {name} {index}: {choice.finish} x{choice.ends} ids {choice.token_ids}"
                      f" {choice.text!r}")  # fmt: skip
        print("  arrivals " + " ".join(f"{t - start:.3f}:{n}" for t, n in heard.arrivals))
        for kill in self.seen.kills:
            if heard.sent - 10 <= kill.when <= heard.over:
                print(f"  {kill.line(start)}")

    def figures(self, results: Results, whole: bool) -> None:
        """All figures; the counts have targets in a run of the default length only."""
        verdicts, kills = self.ledger.verdicts, self.seen.kills
        for name, count, least in (
            ("kills", sum(kill.what != "freeze" for kill in kills), KILLS),
            ("streams", self.ledger.streams, STREAMS),
        ):
            target = 1.0 if whole else None
            met = not whole or count >= least
            results.figure(name, count, least, count / least, target, met)
        results.figure("tokens", self.ledger.tokens, 0, 0, None, True)
        for fault in FAULTS:
            _must_be_none(results, fault.value, verdicts[fault])
        _must_be_none(results, "not_back", len(self.seen.wrong))
        for verdict in (Verdict.BROKEN, Verdict.AWAY, Verdict.CANCELLED, Verdict.DEADLINE,
                        Verdict.SLOW):  # fmt: skip
            results.figure(f"streams_{verdict}", verdicts[verdict], self.ledger.streams,
                           verdicts[verdict] / max(1, self.ledger.streams), None, True)  # fmt: skip
        self._pauses(results)
        silence = self._serving_in_silence()
        bound = self.silence_bound
        results.figure(
            "serving_in_silence_s", silence, bound, silence / bound, 1.0, silence <= bound
        )

    def _pauses(self, results: Results) -> None:
        arrivals = [each.heard.arrivals for each in self._prompt_readers()]
        kills = self.seen.kills
        for stage in STAGES[:2]:
            name = stage.partition("-")[0]
            found = pauses(kills, arrivals, stage)
            if not found:
                continue
            every = [pause for each in found for pause in each]
            median, p99 = statistics.median(every), percentile(every, 0.99)
            print(f"    pause {name}: {len(found)} kills, {len(every)} streams", flush=True)
            target = 1.0 if stage == STAGES[0] else None
            met = target is None or median < EXECUTOR_PAUSE
            results.figure(f"pause_{name}_s", median, EXECUTOR_PAUSE, median / EXECUTOR_PAUSE,
                           target, met)  # fmt: skip
            results.figure(f"pause_{name}_p99_s", p99, median, p99 / median, None, True)
        killed = {kill.when for kill in kills if kill.what == "kill"}
        away = [each.end - each.start for each in self.seen.outages if each.start in killed]
        if away:
            median, p99 = statistics.median(away), percentile(away, 0.99)
            results.figure("pause_tokenizer_s", median, EXECUTOR_PAUSE, median / EXECUTOR_PAUSE,
                           None, True)  # fmt: skip
            results.figure("pause_tokenizer_p99_s", p99, median, p99 / median, None, True)

    def _prompt_readers(self) -> list[Stream]:
        """Streams whose tokens come as they are drawn, and are read as they come."""
        return [
            each for each in self.seen.streams
            if each.plan.behaviour is not Behaviour.SLOW and each.ask.door != "http"
            and not {"beam", "best_of"} & each.ask.fields.keys() and each.heard.arrivals
        ]  # fmt: skip

    def _serving_in_silence(self) -> float:
        arrivals = sorted(when for each in self.seen.streams for when, _ in each.heard.arrivals)
        waited = [(each.heard.sent, each.heard.over) for each in self._prompt_readers()]
        return serving_in_silence(self.seen.health, arrivals, waited)


def _must_be_none(results: Results, name: str, count: int) -> None:
    results.figure(name, count, 0, count, 0.0, count == 0)
