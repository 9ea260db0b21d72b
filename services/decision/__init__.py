"""Decision: states and the policy in force in, absolute commands with their reasons out."""

import os

# Read by numpy's BLAS when numpy is first imported, so it stands before everything else of the service. Threads
# gain nothing on matrices of 512 rows and wait by spinning: two of them cost four times the CPU of one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
