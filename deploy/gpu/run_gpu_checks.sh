#!/usr/bin/env bash
# The checks that need a GPU, in under 5 minutes: tests/gpu, then the memory benchmark.
#   deploy/gpu/run_gpu_checks.sh [FOLDER]
# FOLDER (default: gpu-checks) gets memory.json, tests.txt and machine.txt. PYTHON names the interpreter; it needs
# the project with its extras `gpu` and `dev`. Ends non-zero when a test fails, when none ran, or when the benchmark
# does; whether the figures reach their targets is for the reader of memory.json, which has both.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:-gpu-checks}
PYTHON=${PYTHON:-.venv/bin/python}
mkdir -p "$OUT" || exit 2
"$PYTHON" -c 'import cupy, pytest, services' || { echo "$PYTHON lacks the extras gpu and dev" >&2; exit 2; }

{
    date -u +%FT%TZ
    nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current --format=csv
    "$PYTHON" -c 'import cupy; print("CuPy", cupy.__version__, "runtime", cupy.cuda.runtime.runtimeGetVersion())'
} >"$OUT/machine.txt" 2>&1

STATUS=0
# Exit status 5 is "no test was there"; skipped tests would end with 0, so they are looked for.
timeout 120 "$PYTHON" -m pytest -m gpu -rs tests/gpu >"$OUT/tests.txt" 2>&1 || STATUS=1
tail -n 15 "$OUT/tests.txt"
grep -Eq '[0-9]+ passed' "$OUT/tests.txt" || { echo "no test of tests/gpu ran" >&2; STATUS=1; }

timeout 170 "$PYTHON" - "$OUT/memory.json" <<'PY' || STATUS=1
import json
import sys

from loadgen.bench.memory import bench_memory

figures = bench_memory(backend="cupy")
with open(sys.argv[1], "w") as file:
    json.dump(figures, file, indent=2)
print(json.dumps({key: figures[key] for key in ("compaction", "swap", "pause_us", "step_delta_pct")}, indent=1))
PY
exit "$STATUS"
