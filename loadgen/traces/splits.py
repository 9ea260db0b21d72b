"""Which part of a public trace trains and which validates (shared/traces/README.md).

Other traces are kept apart for the final examination; nothing here reads them.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from loadgen.workload.table import Workload

AZURE_TRAIN_S: Final = 40 * 60.0
SESSION_PARTS: Final = 5
SESSION_TRAIN: Final = (0, 1, 2)
SESSION_VALIDATE: Final = (3,)


def azure_split(whole: Workload) -> tuple[Workload, Workload]:
    """(train, validate): Azure chat's first 40 minutes and the remainder.

    ValueError when the workload is not longer than that.
    """
    if whole.duration_s <= AZURE_TRAIN_S:
        raise ValueError(f"{whole.duration_s:.0f} s: expected more than {AZURE_TRAIN_S:.0f} s")
    rest_s = whole.duration_s - AZURE_TRAIN_S
    return whole.window(AZURE_TRAIN_S), whole.window(rest_s, AZURE_TRAIN_S)


def session_split(whole: Workload) -> tuple[Workload, Workload]:
    """(train, validate): sessions whose number leaves 0, 1, 2 or 3 when divided by 5; the others are kept apart.

    The number is the one in the session's name (``trace_0042``), which the reader keeps as the group; so split
    what was read, before scaling or repeating it (those renumber). Subagents stay with their parents.
    """
    left = whole.group % SESSION_PARTS
    train, validate = (
        whole.take(np.flatnonzero(np.isin(left, parts)).astype(np.int64)) for parts in (SESSION_TRAIN, SESSION_VALIDATE)
    )
    return train, validate
