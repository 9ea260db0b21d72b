"""``python -m services.telemetry``."""

from __future__ import annotations

import sys

from services.runtime import main
from services.telemetry.service import Settings, build

if __name__ == "__main__":
    sys.exit(main("telemetry", Settings, build, sys.argv[1:]))
