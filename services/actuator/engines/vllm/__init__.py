"""Tidegate inside a stock vLLM: modules that run in vLLM's own process, and what the actuator needs beside them.

vLLM loads ``scheduler`` (``--scheduler-cls``), ``worker`` (``--worker-extension-cls``), ``middleware``
(``--middleware``) and ``offload`` (the KV connector's spec). ``scheduler`` makes the ``steward``, which keeps quota and
leases; ``commands`` answers the engine protocol; ``pool``, ``tables``, ``traffic`` and ``compaction`` are the steward's
hands in vLLM's structures. In the actuator's process are ``asleep``, ``sleeping`` and ``device_use`` (sleep mode),
``flags`` and ``versions``. ``sessions``, ``holders``, ``labels`` and ``receipts`` are pure. See docs/vllm.md.
"""
