"""Tables of calls that stand alone: Azure, BurstGPT, and time + lengths as ServeGen writes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np

from loadgen.traces.assembly import duration_of, served, single_calls, workload
from loadgen.traces.errors import BadLines, MalformedLine
from loadgen.traces.fields import MAX_SECONDS, STAMP_FORM, Header, seconds, shown, stamp_ns, whole
from loadgen.workload.table import Workload
from schemas.classes import ServiceClass


class TableFormat(msgspec.Struct, frozen=True):
    """Which columns hold what."""

    name: str
    time: str
    prompt: str
    output: str
    is_stamp: bool
    """A date and time, otherwise seconds from some start."""

    @property
    def columns(self) -> tuple[str, str, str]:
        return self.time, self.prompt, self.output


TABLES: Final = {
    "azure": TableFormat("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", True),
    "burstgpt": TableFormat("burstgpt", "Timestamp", "Request tokens", "Response tokens", False),
    "servegen": TableFormat("servegen", "t_s", "prompt_tokens", "output_tokens", False),
}


def read_single(
    lines: Iterable[tuple[int, str]],
    header: Header,
    table: TableFormat,
    bad: BadLines,
    service_class: ServiceClass = ServiceClass.CHAT,
) -> Workload:
    """Calls in order of time; the first is at 0. Rows out of order are sorted, and a note says how many."""
    at, prompt_at, output_at = (header.place[name.casefold()] for name in table.columns)
    times: list[float] = []
    prompts: list[int] = []
    outputs: list[int] = []
    origin_ns: int | None = None
    for number, text in lines:
        try:
            cells = header.cells(text)
            if table.is_stamp:
                stamp = stamp_ns(table.time, cells[at])
                origin_ns = stamp if origin_ns is None else origin_ns
                time_s = (stamp - origin_ns) / 1e9
                if abs(time_s) > MAX_SECONDS:
                    expected = f"{STAMP_FORM}, within a year of the first"
                    raise MalformedLine(table.time, shown(cells[at]), expected)
            else:
                time_s = seconds(table.time, cells[at])
            prompt = whole(table.prompt, cells[prompt_at])
            output = whole(table.output, cells[output_at])
        except MalformedLine as problem:
            bad.add(number, problem)
            continue
        times.append(time_s)
        prompts.append(prompt)
        outputs.append(output)
    arrival_s = np.array(times, dtype=np.float64)
    prompt_tokens = np.array(prompts, dtype=np.int64)
    output_tokens = np.array(outputs, dtype=np.int64)
    rows, left_out = served(prompt_tokens, output_tokens, bad)
    kept_s = arrival_s[rows]
    notes = bad.notes()
    backwards = int((np.diff(kept_s) < 0).sum())
    if backwards:
        notes.append(f"{backwards:,} rows were earlier than the row before them: sorted by {table.time}")
    rows = rows[np.argsort(kept_s, kind="stable")]
    arrival_s = arrival_s[rows] - arrival_s[rows[0]]
    columns = single_calls(arrival_s, prompt_tokens[rows], output_tokens[rows])
    return workload(bad.path, table.name, columns, service_class, duration_of(arrival_s), left_out, notes)
