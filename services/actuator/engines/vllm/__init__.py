"""Tidegate inside a stock vLLM: modules that run in vLLM's own process, and what the actuator needs beside them.

``scheduler`` (the class given to ``--scheduler-cls``), ``worker`` (``--worker-extension-cls``), ``middleware``
(``--middleware``) and ``offload`` (the KV connector's spec) import vLLM and nothing of Tidegate's own services. The
others are pure. See docs/vllm.md.
"""
