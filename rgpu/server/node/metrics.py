"""A daemon's metrics for Prometheus: one table, counted and collected here (docs/operators/metrics.md).

Served as HTTP, or HTTPS, on the address that ``--metrics`` names, by a thread of its
own; the daemon's state (:mod:`.node_state`) is read in the daemon's loop at each scrape.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rgpu.server.node.ports.scrape_guard import ScrapeOptions
from rgpu.server.node.ports.scrape_port import ScrapePort
from rgpu.session.errors import UsageError

log = structlog.get_logger(__name__)

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
SCRAPE_SECONDS = 3.0  #: for the daemon's loop to return its state
SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 600.0)

#: labels → value
Samples = dict[tuple[str, ...], float]
#: reads the daemon's state, by metric; runs in its loop
ReadState = Callable[[], Coroutine[Any, Any, dict[str, Samples]]]


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric. ``kind``: gauge, counter or histogram; ``where``: each node, or only the one that leads."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str
    where: str = "node"


TABLE: tuple[Spec, ...] = (
    Spec("rgpu_node_info", "gauge", ("host", "version"), "1; the node that is scraped."),
    Spec("rgpu_node_in_time", "gauge", (), "1 while the node may begin anything, 0 past its deadline."),
    Spec("rgpu_port_reachable", "gauge", ("port",), "1 while the node's own daemon can reach the port: data, control."),
    Spec("rgpu_port_waiting", "gauge", ("port",), "Connections whose peer has not authenticated yet."),
    Spec("rgpu_port_turned_away_total", "counter", ("port",), "Connections ended before their peer authenticated."),
    Spec("rgpu_leader", "gauge", (), "1 while this node is the pool's coordinator."),
    Spec("rgpu_leader_revision", "gauge", (), "Highest leader revision on record that this node has seen."),
    Spec("rgpu_sessions", "gauge", ("state",), "Sessions on this node: running, paused (a move), incoming (a move)."),
    Spec("rgpu_device_memory_bytes", "gauge", ("device",), "Memory of a device that sessions may have in all."),
    Spec("rgpu_device_promised_bytes", "gauge", ("device",), "Of it, the quotas of the sessions here."),
    Spec("rgpu_device_healthy", "gauge", ("device",), "1, or 0 for a device that takes no sessions."),
    Spec("rgpu_session_memory_bytes", "gauge", ("session",), "Device memory that the session holds."),
    Spec("rgpu_session_calls_total", "counter", ("session",), "Calls of the session applied here."),
    Spec("rgpu_session_awaited_calls_total", "counter", ("session",), "Of them, calls that the program waited for."),
    Spec("rgpu_session_managed_faults_total", "counter", ("session",), "Touches of managed memory by the program's CPU "
         "that waited for the device."),
    Spec("rgpu_session_gpu_seconds_total", "counter", ("session",), "Seconds with work of the session on its device, "
         "by this worker."),
    Spec("rgpu_session_catch_ups_total", "counter", ("session",), "Backlogs that this worker began to apply in the "
         "order of issue."),
    Spec("rgpu_session_catch_up_stalls_total", "counter", ("session",), "Of them, those whose work came to overlap "
         "because work waited for a later call."),
    Spec("rgpu_session_held_seconds_total", "counter", ("session",), "Seconds that the session was held to its share "
         "of the device's time."),
    Spec("rgpu_session_journal_bytes", "gauge", ("session",), "Journal that the session's agent keeps."),
    Spec("rgpu_worker_deaths_total", "counter", (), "Workers that ended without being told to."),
    Spec("rgpu_hardware_faults_total", "counter", ("device",), "Workers that a fault of the hardware ended."),
    Spec("rgpu_commands_total", "counter", ("verb", "outcome"),
         "Commands of coordinators to this node; outcome: ok, or the code of the error."),
    Spec("rgpu_command_seconds", "histogram", ("verb",), "How long a command took."),
    Spec("rgpu_requests_total", "counter", ("verb", "outcome"),
         "Control requests answered; outcome: ok, or the code of the error."),
    Spec("rgpu_decisions_total", "counter", ("decision",), "Decisions written to the registry.", "leader"),
    Spec("rgpu_moves_total", "counter", ("outcome",), "Moves that ended: committed, aborted, refused or fenced.",
         "leader"),
    Spec("rgpu_move_downtime_seconds", "histogram", (), "Downtime of a committed move.", "leader"),
    Spec("rgpu_move_bytes_total", "counter", (), "Bytes of pages that moves sent.", "leader"),
    Spec("rgpu_move_mode_total", "counter", ("mode",), "Committed moves by mode: copy or replay.", "leader"),
    Spec("rgpu_move_mismatched_pages_total", "counter", (), "Pages that replays of moves got wrong.", "leader"),
    Spec("rgpu_move_repaired_bytes_total", "counter", (), "Bytes of mismatched pages that were sent again.", "leader"),
    Spec("rgpu_pool_nodes", "gauge", ("state",), "Nodes of the pool: ready, cordoned, draining, unhealthy.", "leader"),
    Spec("rgpu_pool_sessions", "gauge", ("state",), "Session records by state.", "leader"),
    Spec("rgpu_pool_gangs", "gauge", ("state",), "Gangs: running, or queued (also while they gather).", "leader"),
    Spec("rgpu_gang_generation", "gauge", ("gang",), "Generation of each running gang.", "leader"),
    Spec("rgpu_pool_queue", "gauge", ("kind",), "Waiting for a place: requests, parked sessions.", "leader"),
    Spec("rgpu_pool_paused", "gauge", (), "1 while automation is paused.", "leader"),
)
SPECS = {spec.name: spec for spec in TABLE}


def parse_address(text: str, option: str = "--metrics") -> tuple[str, int]:
    """``HOST:PORT`` of ``option``. Raises :class:`UsageError`."""
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{option} {text!r} is no HOST:PORT")
    return host.strip("[]"), int(port)


class Metrics:
    """Counters of one daemon, and its state when scraped. Without :meth:`serve` it only counts."""

    def __init__(self) -> None:
        self.port = 0  #: where it is served, once it is
        self._registry = CollectorRegistry()
        self._counters = {s.name: Counter(s.name, s.help, s.labels, registry=self._registry) for s in TABLE
                          if s.kind == "counter" and not s.name.startswith(("rgpu_session_", "rgpu_port_"))}
        self._histograms = {s.name: Histogram(s.name, s.help, s.labels, registry=self._registry, buckets=SECONDS)
                            for s in TABLE if s.kind == "histogram"}
        self._stop: Callable[[], None] = lambda: None

    # -- what happens ---------------------------------------------------------------
    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        """Add ``by`` to a counter."""
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(by)

    def observe(self, name: str, seconds: float, *labels: str) -> None:
        """Add a duration in seconds to a histogram."""
        histogram = self._histograms[name]
        (histogram.labels(*labels) if labels else histogram).observe(seconds)

    def command(self, verb: str, outcome: str, seconds: float) -> None:
        """Count a coordinator's command that was done, or refused; ``seconds``: its duration."""
        self.count("rgpu_commands_total", verb, outcome)
        self.observe("rgpu_command_seconds", seconds, verb)

    def leader(self, what: str, values: dict[str, Any]) -> None:
        """Count a report of the coordinator on this node (:class:`rgpu.migrate.leader.term.decisions.Term`)."""
        if what == "decision":
            self.count("rgpu_decisions_total", str(values["decision"]))
        elif what == "move":
            self.count("rgpu_moves_total", str(values["outcome"]))
            self.count("rgpu_move_bytes_total", by=float(values.get("bytes_sent") or 0))
            self.count("rgpu_move_mismatched_pages_total", by=float(values.get("mismatched_pages") or 0))
            self.count("rgpu_move_repaired_bytes_total", by=float(values.get("repaired_bytes") or 0))
            if values["outcome"] == "committed":
                self.count("rgpu_move_mode_total", str(values.get("mode") or "unknown"))
                self.observe("rgpu_move_downtime_seconds", float(values.get("downtime_ms") or 0.0) / 1000)

    # -- serving ----------------------------------------------------------------------
    def serve(self, options: ScrapeOptions, loop: asyncio.AbstractEventLoop, state: ReadState) -> None:
        """Answer scrapes. Raises :class:`UsageError`, :class:`LinkError` (the port is taken), and what reading the
        certificate, its key and the token raises."""
        options.check()
        host, port = parse_address(options.address)
        self._registry.register(_State(state, loop))
        ProcessCollector(registry=self._registry)
        server = ScrapePort((host, port), self._registry, options)
        self.port = server.port
        self._stop = server.close
        scheme = "https" if options.cert else "http"
        log.info("metrics are served", address=f"{scheme}://{host}:{self.port}/metrics",
                 token=options.token_file is not None)
        if options.token_file is not None and not options.cert and host not in LOOPBACK:
            log.warning("the token of the metrics port goes over the network in clear: give it a certificate "
                        "(--metrics-cert, --metrics-key)", address=options.address)

    def close(self) -> None:
        """Stop serving."""
        self._stop()


class _State(Collector):
    """The daemon's state, collected for Prometheus' registry in the HTTP server's thread."""

    def __init__(self, state: ReadState, loop: asyncio.AbstractEventLoop) -> None:
        self._state, self._loop = state, loop

    def describe(self) -> Iterable[Metric]:
        return []  # so that registering it does not collect

    def collect(self) -> Iterator[Metric]:
        try:
            state = asyncio.run_coroutine_threadsafe(self._state(), self._loop).result(SCRAPE_SECONDS)
        except Exception as error:  # noqa: BLE001 - counters are served even where the registry is away
            log.warning("a scrape lacks the node's state", reason=repr(error))
            return
        for name, samples in state.items():
            spec = SPECS[name]
            family = (CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily)(
                name, spec.help, labels=spec.labels)
            for labels, value in samples.items():
                family.add_metric(list(labels), value)
            yield family


def document() -> str:
    """Text of docs/operators/metrics.md."""
    rows = [f"| `{s.name}` | {s.kind} | {', '.join(s.labels)} | {s.where} | {s.help} |" for s in TABLE]
    return "\n".join([
        "<!-- Generated by `python -m rgpu.server.node.metrics_docs`; do not edit. -->", "", "# Metrics", "",
        "`rgpu server --metrics HOST:PORT` answers Prometheus at `/metrics`: names of sessions and figures, no",
        "secrets; listen where only the monitoring reaches it, or ask for [TLS and a token](monitoring.md#prometheus).",
        "Beside these there are the `process_*` metrics of the daemon's process. *Where*: each node, or only the one",
        "that leads (the others count from 0).",
        "Counters begin at 0 with each daemon; those of sessions go on where the session goes.", "",
        "| name | kind | labels | where | meaning |", "|---|---|---|---|---|", *rows, ""])
