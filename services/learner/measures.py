"""The learner's metrics."""

from __future__ import annotations

from services.learner.intake import Taken
from services.learner.training import Learned, Trainer
from services.observe import Observe


class Measures:
    """Prometheus metrics ``tidegate_learner_*``."""

    def __init__(self, observe: Observe) -> None:
        self.messages = observe.counter("messages", "Messages taken in, by what became of them", ["result"])
        self.transitions = observe.counter(
            "transitions", "Rows by result: accepted, again (read anew after a restart) or why dropped", ["result"]
        )
        self.replay_rows = observe.gauge("replay_rows", "Rows in the replay")
        self.workers = observe.gauge("workers", "Workers whose trajectories are followed")
        self.updates = observe.counter("updates", "Gradient steps made")
        self.refused = observe.counter("updates_refused", "Gradient steps not made because they were not finite")
        self.forgiven = observe.counter("updates_forgiven", "Gradient steps owed beyond max_updates_per_fetch")
        self.loss = observe.gauge("loss", "Mean weighted Huber loss of the last fetch's steps")
        self.td_error = observe.gauge("td_error", "Mean absolute TD error of the last fetch's steps")
        self.q_mean = observe.gauge("q_mean", "Mean Q of the last fetch's sampled states")
        self.candidates = observe.counter(
            "candidates", "Candidates by result: published, delayed (bus away), unfit", ["result"]
        )
        self.checkpoints = observe.counter("checkpoints", "By result: written, failed, refused", ["result"])
        self.sequence = observe.gauge("stream_sequence", "Stream sequence taken in")
        self.queued = observe.gauge("queued_fetches", "Fetches that wait for the learning thread")
        self.owed = observe.gauge("updates_owed", "Gradient steps owed: how far learning lags behind its rows")
        self.learn_seconds = observe.histogram("learn_seconds", "Time of the gradient steps after a fetch, seconds")

    def note(self, taken: Taken, learned: Learned, trainer: Trainer) -> None:
        """Count one fetch."""
        for result, count in taken.messages.items():
            self.messages.labels(result).inc(count)
        for result, count in taken.rows.items():
            self.transitions.labels(result).inc(count)
        self.replay_rows.set(trainer.intake.replay.size)
        self.workers.set(trainer.intake.trajectories.workers)
        self.sequence.set(trainer.intake.sequence)
        self.owed.set(trainer.owed)
        self.updates.inc(learned.updates)
        self.refused.inc(learned.refused)
        self.forgiven.inc(learned.forgiven)
        if learned.updates:
            self.loss.set(learned.loss)
            self.td_error.set(learned.td_error)
            self.q_mean.set(learned.q_mean)
