"""``python -m loadgen openai ...``: the same as ``tidegate loadgen``."""

from __future__ import annotations

import argparse
import sys

from loadgen.openai.cli import add_arguments, run
from services.errors import TidegateError, UserError


def main(arguments: list[str]) -> int:
    """Run one command; the exit code, as ``tidegate`` has it."""
    parser = argparse.ArgumentParser(prog="python -m loadgen", description="Make load for a real server.")
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except TidegateError as error:
        sys.stderr.write(f"loadgen: {error}\n")
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
