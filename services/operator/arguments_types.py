"""Words of a command line that are checked as they are read."""

from __future__ import annotations

import argparse


def given(text: str) -> str:
    """An empty word is a variable that was never set: it must not come to mean all workers, or the default."""
    if not text.strip():
        raise argparse.ArgumentTypeError("found nothing, expected a name")
    return text.strip()


def seconds(text: str) -> float:
    """Above 0, up to an hour."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected seconds, above 0 and up to 3600")
    return value
