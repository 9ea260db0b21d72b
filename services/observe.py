"""What a service shows of itself: spans and Prometheus metrics.

An ``Observe`` belongs to one service in one process and shares no state with another: its registry and its
tracer are its own, so that tests may make many. The tracing SDK is imported only when tracing is switched on
(4 MB, 18 MB with gRPC, and a third of a second that a service without it need not pay).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from services.settings import CommonSettings
from services.spans import NULL_SPAN, Attribute, Kind, NullSpan, Span

if TYPE_CHECKING:
    from services.tracing import Tracer

METRIC_PREFIX = "tidegate_"
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class Observe:
    """Spans and metrics of one service.

    ``service``: its name, the second word of all its metric names. ``tracing`` is False until ``start`` finds
    that traces are to go somewhere; hot paths check it before any work for a span.
    """

    def __init__(self, service: str) -> None:
        self.service = service
        self.tracing = False
        self.registry = CollectorRegistry(auto_describe=False)
        self._tracer: Tracer | None = None

    def start(self, settings: CommonSettings, environ: Mapping[str, str], *, instance: str, rng: random.Random) -> None:
        """Begin tracing where ``settings`` or the OTEL_* variables name a destination, and process metrics.

        ``rng`` decides which new traces are sampled. Raises SettingsError for an OTEL_* value that cannot be
        used and UserError for a trace file that cannot be written.
        """
        ProcessCollector(namespace=f"{METRIC_PREFIX}{self.service}", registry=self.registry)
        GCCollector(registry=self.registry)
        if settings.trace_file or _otlp_wanted(environ):
            from services import tracing  # only here: see the module's docstring

            self._tracer = tracing.Tracer(
                tracing.destinations(settings, environ, otlp=_otlp_wanted(environ)),
                service=self.service,
                instance=instance,
                ratio=tracing.root_ratio(settings, environ),
                environ=environ,
                rng=rng,
            )
            self.tracing = True

    def stop(self, timeout_s: float) -> bool:
        """Send what was recorded; False when it took longer than ``timeout_s`` and the rest was given up."""
        tracer, self._tracer, self.tracing = self._tracer, None, False
        return tracer is None or tracer.shutdown(timeout_s)

    def span(
        self,
        name: str,
        *,
        kind: Kind = "internal",
        parent: Mapping[str, str] | None = None,
        links: Sequence[Mapping[str, str] | None] = (),
        attributes: Mapping[str, Attribute] | None = None,
        subject: str = "",
    ) -> Span:
        """A span, begun now, for use in a ``with`` block.

        ``parent``: headers of the message that caused the operation. Its trace is continued, if it was
        sampled; one without a well-formed context begins a new trace, which is sampled by ratio, or, where
        there are links, when one of those was. ``links``: headers of the messages of a batch. ``subject``:
        the message's, for producers and consumers, noted by the OpenTelemetry messaging conventions.
        """
        if self._tracer is None:
            return NULL_SPAN if parent is None else NullSpan(parent)
        return self._tracer.span(name, kind, parent, links, attributes, subject)

    def counter(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
        """A count that only grows; Prometheus appends ``_total`` to its name."""
        return Counter(self._named(name), documentation, labels, registry=self.registry)

    def gauge(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Gauge:
        """A value that goes up and down."""
        return Gauge(self._named(name), documentation, labels, registry=self.registry)

    def histogram(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = Histogram.DEFAULT_BUCKETS,
    ) -> Histogram:
        """A distribution; ``buckets`` are upper bounds in the unit that stands in the name."""
        return Histogram(self._named(name), documentation, labels, registry=self.registry, buckets=buckets)

    def counters_from(self, group: str, read: Callable[[], Mapping[str, int]]) -> None:
        """Show counters that somebody else keeps (the bus, for one), read at each scrape.

        ``read`` gives whole numbers that only grow; they appear as ``tidegate_<service>_<group>_<key>_total``.
        """
        self.registry.register(_Counters(self._named(group), read))

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _named(self, name: str) -> str:
        prefix = f"{METRIC_PREFIX}{self.service}_"
        if not _NAME.fullmatch(name) or (name.startswith(METRIC_PREFIX) and not name.startswith(prefix)):
            raise ValueError(f"metric {name!r} of {self.service}: expected lower case words after {prefix!r}")
        return name if name.startswith(prefix) else prefix + name


class _Counters(Collector):
    """A prometheus_client collector over counters kept elsewhere."""

    def __init__(self, prefix: str, read: Callable[[], Mapping[str, int]]) -> None:
        self._prefix = prefix
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        for key, value in self._read().items():
            metric = CounterMetricFamily(f"{self._prefix}_{key}", f"{key}, since this process began")
            metric.add_metric((), value)
            yield metric


def _otlp_wanted(environ: Mapping[str, str]) -> bool:
    """Do the standard variables name a destination? OTEL_SDK_DISABLED and OTEL_TRACES_EXPORTER=none say no."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return any(environ.get(name) for name in names)
