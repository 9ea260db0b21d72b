"""What is wrong with a trace file, and where."""

from __future__ import annotations

from pathlib import Path

from services.errors import UserError


class TraceError(UserError):
    """A trace file that cannot be used; one line names the file, the place, what was found and expected."""

    def __init__(self, path: Path | str, found: str, expected: str, line: int = 0, column: str = "") -> None:
        place = f"{path}"
        if line:
            place += f": line {line}"
        if column:
            place += f": {column}"
        super().__init__(f"{place}: found {found}, expected {expected}")
        self.path = str(path)
        self.line = line
        """1-based; 0 when the file as a whole is meant."""
        self.column = column
        self.found = found
        self.expected = expected


class MalformedLine(ValueError):
    """One line that does not parse; a reader turns it into a TraceError or counts it."""

    def __init__(self, column: str, found: str, expected: str) -> None:
        super().__init__(f"{column}: found {found}, expected {expected}")
        self.column = column
        self.found = found
        self.expected = expected


class BadLines:
    """What to do with malformed lines: fail on the first, or count them and remember the first few."""

    SHOWN = 3

    def __init__(self, path: Path, skip: bool) -> None:
        self.path = path
        self.skip = skip
        self.count = 0
        self.first: list[str] = []

    def add(self, line: int, problem: MalformedLine) -> None:
        """Raises TraceError unless bad lines are to be skipped."""
        error = TraceError(self.path, problem.found, problem.expected, line, problem.column)
        if not self.skip:
            raise error from problem
        self.count += 1
        if len(self.first) < self.SHOWN:
            self.first.append(str(error))

    def notes(self) -> list[str]:
        """Lines for the report."""
        return [f"left out: {told}" for told in self.first]
