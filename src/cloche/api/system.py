"""The server's own endpoints: `/health`, `/ready` and `/metrics`."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from cloche import errors
from cloche.api.auth import Gatekeeper, is_local
from cloche.api.dialect import DialectRouter, dialect_route, json_reply
from cloche.api.http import status_of
from cloche.api.requests import RequestTracker
from cloche.engine.engine import Engine
from cloche.engine.operations.health import Health
from cloche.gateway.gateway import GatewayCounters
from cloche.telemetry import Histogram


def own_router(routes: Sequence[BaseRoute]) -> DialectRouter:
    """A router for the server's own routes, with errors in the server's own format."""
    return DialectRouter(routes, _missing_route_reply)


def _missing_route_reply(status: int, what: str) -> Response:
    kind = errors.NotFound if status == 404 else errors.InvalidRequest
    hint = ": docs/deploy.md says what there is" if status == 404 else ""
    return json_reply({"error": {"code": kind.code, "message": what + hint}}, status)


class SystemApi:
    """`/health`, `/ready`, `/metrics`.

    None of them reveals tenants. `/metrics` still shows the host's load: over a network it needs an admin's key.
    """

    def __init__(
        self,
        engine: Engine,
        gateway: GatewayCounters,
        health: Health,
        traffic: RequestTracker,
        gatekeeper: Gatekeeper,
        *,
        local: bool,
    ):
        self.accepting = False  # from the first canary until the server is stopped
        self._health = health
        self._audit_log = engine.audit_log
        self._records = engine.records
        self._gatekeeper = gatekeeper
        self._local = local  # bound to a loopback address
        self._registry = CollectorRegistry()
        self._registry.register(_MetricsCollector(engine, gateway, health, traffic))
        ProcessCollector(registry=self._registry)
        self._routes = own_router(
            [
                dialect_route(self, "GET", "/health", self.health),
                dialect_route(self, "GET", "/ready", self.ready),
                dialect_route(self, "GET", "/metrics", self.metrics),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._routes(scope, receive, send)

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        return error_reply(error)

    async def health(self, request: Request) -> Response:
        verdict = self._health.verdict
        if verdict.ok:
            told = {"status": "ok", "last_success_seconds_ago": round(verdict.age_seconds, 3)}
            failing = {"audit": self._audit_log.failing, "store": self._records.failing}
            return json_reply({**told, **{name: "failing" for name, fails in failing.items() if fails}})
        return json_reply({"status": "failing", "why": verdict.why}, 503)

    async def ready(self, request: Request) -> Response:
        if self.accepting:
            return json_reply({"status": "ready"})
        return json_reply({"status": "not ready", "why": "it is starting or stopping"}, 503)

    async def metrics(self, request: Request) -> Response:
        if not (self._local and is_local(request)):
            self._gatekeeper.admit_admin(request)
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})


def error_reply(error: errors.ClocheError) -> Response:
    """An error in the server's own format."""
    return json_reply({"error": {"code": error.code, "message": str(error)}}, status_of(error))


class _MetricsCollector(Collector):
    """Reads the numbers at scrape time. Labels are fixed words, never user input."""

    def __init__(self, engine: Engine, gateway: GatewayCounters, health: Health, traffic: RequestTracker):
        self._engine = engine
        self._gateway = gateway
        self._health = health
        self._traffic = traffic

    def collect(self) -> Iterable[Metric]:
        yield from self._sandbox_metrics()
        yield from self._execution_metrics()
        yield from self._capacity_metrics()
        yield from self._request_metrics()
        yield from self._gateway_metrics()
        yield from self._audit_metrics()
        yield from self._store_metrics()
        yield from self._network_metrics()

    def _sandbox_metrics(self) -> Iterable[Metric]:
        counters = self._engine.counters
        yield GaugeMetricFamily("cloche_sandboxes", "Sandboxes that run now.", self._engine.running)
        yield GaugeMetricFamily("cloche_sandboxes_paused", "Sandboxes that are paused now.", self._engine.paused)
        yield GaugeMetricFamily("cloche_pool_ready", "Cells that wait to become sandboxes.", self._engine.waiting)
        yield CounterMetricFamily("cloche_sandboxes_created", "Sandboxes that were made.", counters.created)
        yield _labelled_counter("cloche_sandboxes_ended", "Sandboxes that ended, by how.", "state", counters.ended)
        yield _labelled_counter(
            "cloche_sandboxes_not_created", "Sandboxes that could not be made.", "reason", counters.not_created
        )
        creation = HistogramMetricFamily("cloche_sandbox_creation_seconds", "How long making one took.", labels=())
        yield _add_histogram_samples(creation, (), counters.creation_seconds)

    def _execution_metrics(self) -> Iterable[Metric]:
        counters, verdict = self._engine.counters, self._health.verdict
        yield GaugeMetricFamily("cloche_healthy", "1 if executions work, else 0.", int(verdict.ok))
        yield _labelled_counter(
            "cloche_executions", "Executions that ended, by outcome.", "outcome", counters.executions
        )
        seconds = HistogramMetricFamily("cloche_execution_seconds", "How long executions took.", labels=())
        yield _add_histogram_samples(seconds, (), counters.execution_seconds)

    def _capacity_metrics(self) -> Iterable[Metric]:
        admission, labels = self._engine.cell_supply.admission, ("what",)
        places = GaugeMetricFamily("cloche_capacity", "How many there can be at once.", labels=labels)
        in_use = GaugeMetricFamily("cloche_capacity_in_use", "How many there are.", labels=labels)
        waiting = GaugeMetricFamily("cloche_capacity_waiting", "Requests that wait for one.", labels=labels)
        refused = CounterMetricFamily(
            "cloche_capacity_refused", "Requests that waited in vain, or could not.", labels=("what", "reason")
        )
        waits = HistogramMetricFamily(
            "cloche_capacity_wait_seconds", "How long requests waited for one.", labels=labels
        )
        for what, gate in (("sandboxes", admission.sandboxes), ("executions", admission.executions)):
            places.add_metric((what,), gate.room.places)
            in_use.add_metric((what,), gate.in_use)
            waiting.add_metric((what,), gate.waiting)
            for reason, count in sorted(gate.refused.items()):
                refused.add_metric((what, reason), count)
            _add_histogram_samples(waits, (what,), gate.waited_seconds)
        yield from (places, in_use, waiting, refused, waits)
        wanted = self._engine.cell_supply.wanted
        yield GaugeMetricFamily("cloche_pool_wanted", "Cells that would wait if there were room for them.", wanted)
        left = admission.memory.left_bytes
        if left is not None:
            yield GaugeMetricFamily("cloche_memory_left_bytes", "Memory that this host has left.", left)

    def _request_metrics(self) -> Iterable[Metric]:
        traffic = self._traffic
        requests = CounterMetricFamily("cloche_requests", "Requests that ended.", labels=("dialect", "status"))
        for (dialect, status), count in sorted(traffic.requests.items()):
            requests.add_metric((dialect, str(status)), count)
        yield requests
        seconds = HistogramMetricFamily("cloche_request_seconds", "How long requests took.", labels=("dialect",))
        for dialect, histogram in sorted(traffic.seconds.items()):
            _add_histogram_samples(seconds, (dialect,), histogram)
        yield seconds

    def _gateway_metrics(self) -> Iterable[Metric]:
        counters = self._gateway
        yield _labelled_counter(
            "cloche_gateway_requests", "Requests for a model's answer, by outcome.", "status", counters.requests
        )
        yield _labelled_counter(
            "cloche_gateway_model_calls", "Calls of models, by outcome.", "status", counters.model_calls
        )
        yield _labelled_counter(
            "cloche_gateway_executions", "Code that models ran, by outcome.", "outcome", counters.executions
        )
        yield _labelled_counter(
            "cloche_gateway_tokens", "Tokens that models read and wrote.", "direction", counters.tokens
        )

    def _audit_metrics(self) -> Iterable[Metric]:
        audit_log = self._engine.audit_log
        failing = int(bool(audit_log.failing))
        yield GaugeMetricFamily("cloche_audit_failing", "1 if the audit log cannot be written.", failing)
        yield CounterMetricFamily(
            "cloche_audit_lost", "What the audit log should have told, and does not.", audit_log.lost
        )

    def _store_metrics(self) -> Iterable[Metric]:
        failing = int(self._engine.records.failing)
        yield GaugeMetricFamily("cloche_store_failing", "1 if the store cannot be written.", failing)
        refused = self._engine.quotas.refused
        yield _labelled_counter("cloche_quota_refused", "What was refused for a quota, by which.", "quota", refused)
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(self._engine.config.data_dir).free
            yield GaugeMetricFamily("cloche_data_free_bytes", "Room that the data directory's disk has.", free)

    def _network_metrics(self) -> Iterable[Metric]:
        """Yields nothing before any sandbox had a network: then egress is not loaded."""
        egress = self._engine.networks.egress
        if egress is None:
            return
        open_now = GaugeMetricFamily("cloche_network_open", "Connections that are open now.", egress.connections)
        ended = CounterMetricFamily(
            "cloche_network_connections", "Connections of programs that ended.", labels=("verdict", "protocol")
        )
        for labels, count in sorted(egress.counters.connections.items()):
            ended.add_metric(labels, count)
        moved = {"sent": egress.counters.sent_bytes, "received": egress.counters.received_bytes}
        yield from (
            open_now,
            ended,
            _labelled_counter("cloche_network_bytes", "Bytes that went through them.", "direction", moved),
        )
        files = egress.package_files
        yield _labelled_counter(
            "cloche_package_files", "Files of packages, by whether the cache had them.", "cache", files
        )


def _labelled_counter(name: str, help: str, label: str, counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, help, labels=(label,))
    for value, count in sorted(counts.items()):
        family.add_metric((value,), count)
    return family


def _add_histogram_samples(
    family: HistogramMetricFamily, labels: tuple[str, ...], histogram: Histogram
) -> HistogramMetricFamily:
    buckets, total = [], 0
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    family.add_metric(labels, buckets, histogram.sum)
    return family
