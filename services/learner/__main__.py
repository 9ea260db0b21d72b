"""``python -m services.learner``."""

from __future__ import annotations

import sys

from services.learner.service import Settings, build
from services.runtime import main

if __name__ == "__main__":
    sys.exit(main("learner", Settings, build, sys.argv[1:]))
