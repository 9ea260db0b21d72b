"""What the featurizer shows on /metrics."""

from __future__ import annotations

import numpy as np

from schemas.actions import Hold
from services.featurizer.tracker import States
from services.featurizer.validate import Counts
from services.observe import Observe

LATENCY_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class Measures:
    """Prometheus metrics of one featurizer."""

    def __init__(self, observe: Observe) -> None:
        counter, gauge = observe.counter, observe.gauge
        self._samples = counter("samples", "Node samples turned into states")
        self._rejected = counter("rejected", "Messages dropped, by family and reason", ["family", "reason"])
        self._events = counter("events", "What is odd in samples, by reason and metric", ["reason", "metric"])
        self._pairing = counter("pairing", "Why no transition was made or an outcome not used", ["reason"])
        self._transitions = counter("transitions", "Worker transitions published")
        self._nodes = gauge("nodes", "Nodes followed")
        self._workers = gauge("workers", "Workers followed")
        held = gauge("held", "Workers held in the last batch of samples, by reason", ["reason"])
        self._held = {hold: held.labels(hold.name.lower()) for hold in Hold if hold is not Hold.NONE}
        self._latency = observe.histogram(
            "latency_seconds", "From receipt of samples to the publishing of their states", buckets=LATENCY_BUCKETS
        )

    def reject(self, family: str, reason: str) -> None:
        self._rejected.labels(family, reason).inc()

    def sampled(self, states: list[States], nodes: int, workers: int, latency_s: float) -> None:
        self._samples.inc(sum(len(some.spans) for some in states))
        self._nodes.set(nodes)
        self._workers.set(workers)
        held = np.zeros(256, np.int64)
        for some in states:
            held += np.bincount(some.holds, minlength=256)
        for hold, shown in self._held.items():
            shown.set(int(held[hold]))
        self._latency.observe(latency_s)

    def drain(self, samples: Counts, pairing: Counts) -> None:
        """Take over counts that the pure parts kept, and set them to nothing."""
        for (reason, metric), number in samples.items():
            self._events.labels(reason, metric).inc(number)
        for (reason, _), number in pairing.items():
            self._pairing.labels(reason).inc(number)
        samples.clear()
        pairing.clear()

    def transitions(self, number: int) -> None:
        self._transitions.inc(number)
