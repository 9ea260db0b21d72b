"""``python -m services.featurizer``."""

from __future__ import annotations

import sys

from services.featurizer.service import Settings, build
from services.runtime import main

if __name__ == "__main__":
    sys.exit(main("featurizer", Settings, build, sys.argv[1:]))
