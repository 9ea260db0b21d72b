"""``python -m loadgen.examiner``."""

from __future__ import annotations

import sys

from loadgen.examiner.service import Settings, build
from services.runtime import main

if __name__ == "__main__":
    sys.exit(main("examiner", Settings, build, sys.argv[1:]))
