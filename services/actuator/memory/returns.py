"""When does a conversation come back, or has it ended? The estimator behind victims and prefetch. Pure.

Each session's own gaps count first, those after a turn that ended as its last one did; where it has few they lean on
the gaps of sessions of its kind after such an ending (``return_kinds``) and at the same tempo, and those on a flat
guess (:func:`return_rates.shrunk` at every step); the hour of the day changes the kind's rates where data shows that
it does (``return_hours``). A ``kind`` is whatever the caller tells apart: the service class. Sessions that still wait
teach too, as exposure without an event; learning from returns alone would call every long wait impossible. DESIGN
sections 5 and 7.

Ask again while a session idles: every answer is given what is known by ``now_s``, that it is not back yet. A session
that outstays its expectation is a different one. All instants are seconds of one clock; it never runs backwards.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.endings import Ending
from services.actuator.memory import return_rates as rates_of
from services.actuator.memory.return_history import FIRST, History, Wait
from services.actuator.memory.return_hours import HOURS, HourCounts
from services.actuator.memory.return_kinds import Kinds
from services.actuator.memory.return_rates import BINS, HORIZON_S
from services.errors import MemoryPlaneError

F8 = NDArray[np.float64]
I8 = NDArray[np.int64]


class ReturnSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much each level is trusted, in events a bin: chosen on part of the training sessions."""

    flat_rate_per_s: float = 1 / 600.0
    """Rate before anything was seen, 1/s."""
    flat_strength: float = 0.05
    kind_strength: float = 4.0
    session_strength: float = 15.0
    quick_trust: float = 0.7
    """How far a rate goes from the kind's to the higher one at the session's tempo, as a power, 0 to 1: who has been
    quick slows down in the end, and the surest tenth of the answers came true too seldom. Lower ones count whole."""
    tempo_memory: float = 0.8
    """Share of a session's tempo (mean of its log gaps) that survives a gap, 0 to 1."""
    session_memory: float = 0.97
    """Share of a session's counts that survives a gap, 0 to 1: people change what they do."""
    kind_memory_events: float = 100_000.0
    """A kind's counts are halved beyond this many returns, so that it follows the site's drift."""
    hours: bool = True
    """Whether the hour of the day counts."""
    hour_gaps: float = 3.0
    """Gaps of its own after which a session's hour counts half (as a power): the first waits lean on it."""
    midnight_s: float = 0.0
    """An instant of the caller's clock at which a day begins, seconds."""
    learn_kinds: bool = True
    """False freezes what is known of kinds (a validation); sessions' own histories go on."""
    sessions_most: int = 200_000
    """Sessions remembered; the one that came back longest ago is forgotten first."""


class UnknownSession(MemoryPlaneError):
    """The session is not waiting: it never finished a turn here, or it is back already."""

    def __init__(self, session: int, waiting: int) -> None:
        super().__init__(f"session {session} is not waiting ({waiting} are)")
        self.session = session
        self.waiting = waiting


class ReturnEstimator:
    """Chances and times of return of the sessions that wait."""

    def __init__(self, settings: ReturnSettings | None = None) -> None:
        self.settings = settings or ReturnSettings()
        self._flat = np.full(BINS, self.settings.flat_rate_per_s)
        self._kinds = Kinds()
        self._histories: dict[int, History] = {}
        self._waits: dict[int, Wait] = {}

    @property
    def waiting(self) -> int:
        return len(self._waits)

    def with_kinds_only(self, settings: ReturnSettings) -> ReturnEstimator:
        """Another estimator that knows of kinds what this one knows now, and no session."""
        other = ReturnEstimator(settings)
        other._kinds = self._kinds.copy()
        return other

    def freeze_kinds(self) -> None:
        """What is known of kinds stays as it is from now on; sessions' own histories go on."""
        self.settings = msgspec.structs.replace(self.settings, learn_kinds=False)

    def kind_rates(self, kind: int, ending: Ending = Ending.UNKNOWN) -> F8:
        """Rates of return of a kind as a whole or after an ending, 1/s, float64 [BINS]: what is known without any
        history."""
        settings = self.settings
        return self._kinds.rates(kind, ending, self._flat, settings.flat_strength, settings.kind_strength).copy()

    def hour_factors(self, kind: int) -> F8:
        """What a kind's rates are multiplied by in waits that begin in each hour of the day, float64 [24]; 1 where
        the data shows no effect."""
        hours = self._hours_of(kind)
        return np.ones(HOURS) if hours is None else hours.by_hour().copy()

    def waiting_rates(self, session: int) -> F8:
        """Rates of return of a waiting session, 1/s, float64 [BINS]. UnknownSession when it does not wait."""
        return self._rates(session, self._wait(session)).copy()

    def finished(self, session: int, kind: int, now_s: float, ending: Ending = Ending.UNKNOWN) -> None:
        """A turn of the session ended so: it waits from now on. A second call for a waiting one starts anew."""
        history = self._histories.get(session)
        context = history.context() if history else FIRST
        self._waits[session] = Wait(kind, context, now_s, ending)

    def returned(self, session: int, now_s: float) -> float:
        """Its next turn came: seconds it was away. UnknownSession when it did not wait."""
        wait = self._waits.pop(session, None)
        if wait is None:
            raise UnknownSession(session, self.waiting)
        gap_s = max(now_s - wait.since_s, 0.0)
        history = self._remembered(session)
        self._credit(wait, gap_s, event=gap_s <= HORIZON_S)  # beyond the horizon it counts as ended
        history.add(gap_s, wait.ending, self.settings.tempo_memory, self.settings.session_memory)
        return gap_s

    def closed(self, session: int, now_s: float) -> None:
        """Its client said that it will not come back: counted as away until the horizon, then forgotten."""
        wait = self._waits.pop(session, None)
        if wait is None:
            raise UnknownSession(session, self.waiting)
        self._credit(wait, max(HORIZON_S, now_s - wait.since_s), event=False)
        self._histories.pop(session, None)

    def advance(self, now_s: float) -> None:
        """Count the waiting so far of those that still wait; call it every few seconds.

        A session away beyond the horizon stays (its estimates say: ended) until it is closed or comes back.
        """
        for wait in self._waits.values():
            self._credit(wait, now_s - wait.since_s, event=False)

    def ended(self, sessions: I8, now_s: float) -> F8:
        """P(does not come back within the horizon) of each, float64 [n]."""
        return rates_of.ended(*self._of(sessions, now_s))

    def within(self, sessions: I8, now_s: float, window_s: F8 | float) -> F8:
        """P(back within ``window_s`` from now), float64 [n]; one window or one each, seconds."""
        return rates_of.within(*self._of(sessions, now_s), np.broadcast_to(window_s, len(sessions)))

    def quantile(self, sessions: I8, now_s: float, share: float) -> F8:
        """Seconds from now by which a ``share`` of those that come back are back; 0.5: the expected return."""
        return rates_of.quantile(*self._of(sessions, now_s), share)

    def mean_away(self, sessions: I8, now_s: float, window_s: float) -> F8:
        """Expected seconds away out of the next ``window_s``, float64 [n]."""
        return rates_of.mean_away(*self._of(sessions, now_s), window_s)

    def _of(self, sessions: I8, now_s: float) -> tuple[F8, F8]:
        """Rates [n, BINS] and idle times [n] of waiting sessions, int64 [n]."""
        waits = [self._wait(session) for session in sessions.tolist()]
        pairs = zip(sessions.tolist(), waits, strict=True)
        rates = np.array([self._rates(session, wait) for session, wait in pairs]).reshape(len(waits), BINS)
        return rates, np.maximum(now_s - np.array([wait.since_s for wait in waits]), 0.0)

    def _wait(self, session: int) -> Wait:
        wait = self._waits.get(session)
        if wait is None:
            raise UnknownSession(session, self.waiting)
        return wait

    def _rates(self, session: int, wait: Wait) -> F8:
        if wait.rates is not None:
            return wait.rates
        settings, history = self.settings, self._histories.get(session)
        own = None if history is None else history.own(wait.ending)
        kind = self.kind_rates(wait.kind, wait.ending)
        factor = self._hour_factor(wait, 0.0 if own is None else float(own.events.sum()))
        ratio = self._kinds.at_tempo(wait, kind, settings.kind_strength) / kind
        rates = kind * np.where(ratio > 1.0, ratio**settings.quick_trust, ratio) * factor
        if own is not None:
            rates = rates_of.shrunk(own.events, own.seconds, rates, settings.session_strength)
        wait.rates = rates
        return rates

    def _hour_factor(self, wait: Wait, gaps: float) -> float:
        """The hour's factor for a session of so many gaps in memory: its own tempo has most of the hour in it."""
        hours = self._hours_of(wait.kind)
        if hours is None:
            return 1.0
        share = self.settings.hour_gaps / (self.settings.hour_gaps + gaps)
        return float(hours.factor(wait.since_s - self.settings.midnight_s) ** share)

    def _hours_of(self, kind: int) -> HourCounts | None:
        hours = self._kinds.hours.get(kind) if self.settings.hours else None
        if hours is not None and hours.stale:
            hours.make(self.kind_rates(kind))
        return hours

    def _credit(self, wait: Wait, idle_s: float, event: bool) -> None:
        """Count the part of a wait that was not counted yet, and the return that ends it."""
        idle_s = min(idle_s, HORIZON_S)
        if not self.settings.learn_kinds:
            return
        before_s, wait.credited_s = wait.credited_s, max(wait.credited_s, idle_s)
        returns = self._kinds.count(wait, before_s, idle_s, event)
        if self.settings.hours:
            began_s = wait.since_s - self.settings.midnight_s
            self._kinds.count_hour(wait.kind, began_s, before_s, idle_s, event)
        if event and returns > self.settings.kind_memory_events:
            self._kinds.halve(wait.kind)

    def _remembered(self, session: int) -> History:
        history = self._histories.pop(session, None) or History()
        self._histories[session] = history  # the newest last
        if len(self._histories) > self.settings.sessions_most:
            del self._histories[next(iter(self._histories))]
        return history
