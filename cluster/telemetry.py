"""How kvferry speaks of itself: structured logs, and every metric's name, unit and labels in one place."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvferry.cluster.messages import Load
from kvferry.runtime.errors import InvalidArgument, KvferryError
from kvferry.runtime.request import FinishReason, Usage
from kvferry.runtime.timeline import Cause, Phase, Timeline

STOP_TIMEOUT_S = 5.0


def configure_logging(*, json: bool, level: str = "info", context: dict[str, Any] | None = None) -> None:
    """Events with fields on stderr, as lines or as JSON. `context` is bound to all events of the process."""
    # Plain tracebacks: others print local variables, which may hold prompts.
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if json
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _Context(context or {}),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([structlog.processors.format_exc_info] if json else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


class _Context:
    """Adds the process's own fields: context variables would reach only the thread that set them."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __call__(self, _logger: Any, _method: str, event: Any) -> Any:
        return {**self._fields, **event}


Loads = list[tuple[str, str, Load]]
"""Group, role, last report."""
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


_WELL = {FinishReason.STOP.value, FinishReason.LENGTH.value}


class Metrics:
    """Of one gateway. Labels come from closed sets: outcomes (finish reasons and error labels), causes of retries,
    phases, limits that refuse, group ids, roles."""

    def __init__(self, loads: Callable[[], Loads], num_waiting: Callable[[], int]) -> None:
        self.registry = registry = CollectorRegistry()
        waiting = Gauge("kvferry_requests_waiting", "Requests that wait at the gateway for room", registry=registry)
        waiting.set_function(num_waiting)
        self._requests = Counter("kvferry_requests", "Finished requests", ["outcome"], registry=registry)
        self._in_flight = Gauge("kvferry_requests_in_flight", "Requests being served", registry=registry)
        self._ttft = Histogram(
            "kvferry_time_to_first_token_seconds", "Received to first token", buckets=SECONDS, registry=registry
        )
        self._duration = Histogram(
            "kvferry_request_duration_seconds", "Received to finished", buckets=SECONDS, registry=registry
        )
        self._tokens = Counter("kvferry_tokens", "Tokens of finished requests", ["kind"], registry=registry)
        self._refused = Counter(
            "kvferry_refused_requests", "Requests that were not taken in, by error", ["reason"], registry=registry
        )
        self._retries = Counter(
            "kvferry_retries", "Sequences that began anew on another group", ["cause"], registry=registry
        )
        self._phases = Counter(
            "kvferry_phase_seconds", "Where the time of ended requests went", ["phase"], registry=registry
        )
        for cause in Cause:
            self._retries.labels(cause=cause.value)
        for phase in Phase:
            self._phases.labels(phase=phase.value)
        self._ferried = Counter("kvferry_ferried_bytes", "KV bytes received from other groups", registry=registry)
        self._deaths = Counter("kvferry_group_deaths", "Groups that died", ["group"], registry=registry)
        registry.register(_Groups(loads))

    def serve(self, host: str, port: int) -> Callable[[], None]:
        """A Prometheus endpoint in a thread of its own; returns what ends it. Raises `InvalidArgument`."""
        try:
            server, thread = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            limit = f"cannot be bound on {host}: {error}"
            raise InvalidArgument("metrics_port", port, limit, "choose another --metrics-port") from None

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join(STOP_TIMEOUT_S)

        return stop

    def begun(self) -> None:
        self._in_flight.inc()

    def refused(self, error: KvferryError) -> None:
        """Before it began."""
        self._refused.labels(reason=error.facts.get("limit", error.label)).inc()

    def ended(self, outcome: str, timeline: Timeline) -> None:
        """`outcome`: a finish reason or an error's label."""
        self._in_flight.dec()
        self._requests.labels(outcome=outcome).inc()
        for setback in timeline.setbacks:
            self._retries.labels(cause=setback.cause.value).inc()
        for phase, seconds in timeline.seconds().items():
            self._phases.labels(phase=phase.value).inc(seconds)
        if outcome not in _WELL:
            return
        if timeline.first_token_ns is not None:
            self._ttft.observe((timeline.first_token_ns - timeline.received_ns) / 1e9)
        if timeline.finished_ns is not None:
            self._duration.observe((timeline.finished_ns - timeline.received_ns) / 1e9)

    def used(self, usage: Usage) -> None:
        self._tokens.labels(kind="prompt").inc(usage.num_prompt_tokens)
        self._tokens.labels(kind="cached").inc(usage.num_cached_tokens)
        self._tokens.labels(kind="output").inc(usage.num_output_tokens)
        self._ferried.inc(usage.ferried_bytes)

    def died(self, group: str) -> None:
        self._deaths.labels(group=group).inc()


class _Groups(Collector):
    """The groups' last reports, read when somebody looks."""

    FIELDS = (
        ("num_waiting", "Sequences that wait"),
        ("num_running", "Sequences that hold blocks"),
        ("num_free_blocks", "Blocks free or evictable"),
        ("num_leased_blocks", "Blocks in use"),
        ("num_cached_blocks", "Sealed blocks"),
        ("prefill_tokens_per_s", "Measured rate of prefill"),
        ("decode_step_s", "Measured duration of a decode step"),
        ("drafted_tokens_total", "Tokens guessed by speculation"),
        ("accepted_tokens_total", "Those of them that came true"),
    )

    def __init__(self, loads: Callable[[], Loads]) -> None:
        self._loads = loads

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for field, help_text in self.FIELDS:
            family = GaugeMetricFamily(f"kvferry_group_{field}", help_text, labels=["group", "role"])
            for group, role, load in self._loads():
                family.add_metric([group, role], getattr(load, field))
            yield family
