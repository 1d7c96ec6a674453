"""/metrics for Prometheus: vLLM's base names behind `triptych:`, so dashboards convert by a rename.

Gauges and counters are read when the page is asked for: this process's own, and the scheduler's
Stats over its control socket (left out while it does not answer, never guessed). Histograms and
request_success are of all requests, whichever door they came by, since HTTP is served.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from triptych.v1 import common_pb2, control_pb2

_PREFIX = "triptych:"
_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_REASONS = {
    value.number: value.name.removeprefix("FINISH_REASON_").lower()
    for value in common_pb2.FinishReason.DESCRIPTOR.values
}

_SCHEDULER_GAUGES = (
    ("num_requests_running", "requests_running", "Requests of which tokens are computed."),
    ("num_requests_waiting", "requests_waiting", "Requests that wait to run."),
    ("num_gpu_blocks", "blocks_total", "KV blocks, on whatever device."),
    ("num_free_blocks", "blocks_free", "KV blocks that nobody uses."),
    ("executor_ready", "executor_ready", "1 while an executor has joined."),
    ("grammars_cached", "grammars_cached", "Compiled grammars that are kept."),
    ("sampler_leases", "sampler_leases", "Programs that draw tokens themselves."),
    ("sampler_rows_used", "sampler_rows_used", "Requests whose tokens they draw."),
)
_SCHEDULER_COUNTERS = (
    ("num_preemptions", "preemptions_total", "Sequences that lost their blocks for a while."),
    ("prefix_cache_queries", "prefix_queries_total", "Prompt tokens looked up in the cache."),
    ("prefix_cache_hits", "prefix_hits_total", "Prompt tokens found in the cache."),
    ("prompt_tokens", "prompt_tokens_total", "Prompt tokens computed."),
    ("generation_tokens", "generated_tokens_total", "Tokens sampled."),
    ("spec_decode_num_draft_tokens", "draft_tokens_total", "Tokens guessed ahead."),
    ("spec_decode_num_accepted_tokens", "accepted_draft_tokens_total", "Guesses taken."),
    ("engine_steps", "steps_total", "Steps that the engine has made."),
    ("engine_steps_ahead", "steps_ahead_total", "Steps sent while another was computed."),
    ("device_tokens", "device_tokens_total", "Tokens that the executor drew."),
    ("host_tokens", "host_tokens_total", "Tokens that the scheduler drew."),
    ("wasted_tokens", "wasted_tokens_total", "Tokens of steps ahead that nobody wanted."),
    ("external_tokens", "external_tokens_total", "Tokens that programs drew themselves."),
    ("sampler_timeouts", "sampler_timeouts_total", "Requests whose program drew nothing in time."),
    ("requests_finished", "requests_finished_total", "Requests that ended by themselves."),
    ("requests_aborted", "requests_aborted_total", "Requests that their client gave up."),
    ("admission_rejections", "requests_refused_total", "Requests refused by the scheduler."),
    ("requests_timed_out", "requests_timed_out_total", "Requests whose time-out passed."),
)


class _TokenTimes(Collector):
    """A histogram that takes several equal times at once: one is observed for every piece."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._counts = [0] * (len(_TOKEN_SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float, count: int) -> None:
        self._counts[bisect_left(_TOKEN_SECONDS, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(
            _PREFIX + "inter_token_latency_seconds",
            "From a token to the next.",
            labels=("model_name",),
        )
        bounds = (*map(str, _TOKEN_SECONDS), "+Inf")
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric((self._model,), buckets, self._sum)
        yield family


class Metrics:
    """One registry. An Observer of requests."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model: str) -> None:
        """`model`: the label model_name of every figure."""
        self._model = model
        self._registry = CollectorRegistry()
        self._known: list[Metric] = []
        ProcessCollector(registry=self._registry)
        self._registry.register(_Read(self._known))
        labels = ("model_name",)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(
                _PREFIX + name, text, labels, buckets=buckets, registry=self._registry
            )
            return family.labels(model)

        self._first = histogram(
            "time_to_first_token_seconds", "From request to first token.", _SECONDS
        )
        self._between = _TokenTimes(model)
        self._registry.register(self._between)
        self._whole = histogram("e2e_request_latency_seconds", "From request to end.", _SECONDS)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._output = histogram(
            "request_generation_tokens", "Output tokens of a request.", _TOKENS
        )
        self._success = Counter(
            _PREFIX + "request_success",
            "Choices that ended, by why.",
            (*labels, "finished_reason"),
            registry=self._registry,
        )

    def first_token(self, seconds: float) -> None:
        """See Observer."""
        self._first.observe(seconds)

    def between_tokens(self, seconds: float, tokens: int) -> None:
        """See Observer."""
        self._between.add(seconds, tokens)

    def ended(self, seconds: float, prompt_tokens: int, completion_tokens: int) -> None:
        """See Observer."""
        self._whole.observe(seconds)
        self._prompt.observe(prompt_tokens)
        self._output.observe(completion_tokens)

    def finished(self, reason: int) -> None:
        """See Observer."""
        self._success.labels(self._model, _REASONS.get(reason, "unknown")).inc()

    def page(
        self, own: control_pb2.StatsResponse, scheduler: control_pb2.StatsResponse | None
    ) -> bytes:
        """The page, with the figures of now."""
        self._known[:] = list(self._families(own, scheduler))
        return generate_latest(self._registry)

    def _families(
        self, own: control_pb2.StatsResponse, scheduler: control_pb2.StatsResponse | None
    ) -> Iterator[Metric]:
        tokenizer = own.tokenizer
        yield self._gauge(
            "num_requests_open", "Requests that a client waits for.", tokenizer.requests_running
        )
        yield self._counter("requests", "Requests submitted.", tokenizer.requests_total)
        yield self._counter("responses", "Responses sent.", tokenizer.responses_total)
        yield self._counter("delivered_tokens", "Tokens sent.", tokenizer.tokens_total)
        yield self._gauge(
            "scheduler_connected", "1 while the scheduler answers.", tokenizer.scheduler_connected
        )
        yield self._counter(
            "schedulers_lost", "Schedulers that went away.", tokenizer.schedulers_lost_total
        )
        yield self._counter(
            "choices_resubmitted",
            "Choices that went on with another scheduler.",
            tokenizer.choices_resubmitted_total,
        )
        yield self._gauge("draining", "1 while new requests are refused.", tokenizer.draining)
        if scheduler is None:
            return
        stats = scheduler.scheduler
        for name, field, text in _SCHEDULER_GAUGES:
            yield self._gauge(name, text, getattr(stats, field))
        for name, field, text in _SCHEDULER_COUNTERS:
            yield self._counter(name, text, getattr(stats, field))
        used = stats.blocks_total - stats.blocks_free
        yield self._gauge(
            "kv_cache_usage_perc", "Share of the KV blocks in use, 1 is all.",
            used / stats.blocks_total if stats.blocks_total else 0.0,
        )  # fmt: skip
        yield self._counter(
            "grammar_compile_seconds",
            "CPU time spent on grammars.",
            stats.grammar_compile_seconds_total,
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(_PREFIX + name, text, labels=("model_name",))
        family.add_metric((self._model,), float(value))
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(_PREFIX + name, text, labels=("model_name",))
        family.add_metric((self._model,), float(value))
        return family


class _Read(Collector):
    """What was read elsewhere just before."""

    def __init__(self, known: list[Metric]) -> None:
        self._known = known

    def collect(self) -> Iterable[Metric]:
        return self._known
