"""MPS: a fence around each client's device memory, set when it starts.

``fence``: what is written, and whether it fits. ``control``: the control daemon. ``health``: is the server alive.
``probe``: does the fence hold. ``partitions``: the live limits of MPS v3, where the driver has them.
"""
