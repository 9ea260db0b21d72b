"""``python -m services.decision``."""

from __future__ import annotations

import sys

from services.decision.service import Settings, build
from services.runtime import main

if __name__ == "__main__":
    sys.exit(main("decision", Settings, build, sys.argv[1:]))
