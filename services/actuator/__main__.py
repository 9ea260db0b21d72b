"""``python -m services.actuator``."""

from __future__ import annotations

import sys

from services import runtime
from services.actuator.service import Settings, build

if __name__ == "__main__":
    sys.exit(runtime.main("actuator", Settings, build))
