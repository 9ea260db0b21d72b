"""The services of Tidegate, one folder each, and the shell that runs them.

BLAS threads spin while they wait: with two of them a 10,000-row forward pass takes 45 us a worker instead of 10.
The variable is read when NumPy loads, so it is set before anything of ours imports it; an operator's own value wins.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
