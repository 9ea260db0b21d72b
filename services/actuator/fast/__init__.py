"""Fast, deterministic control beside the engine: admission order, running cap, shedding, offload watermark.

Plain typed functions of numbers that import nothing but ``math``: the vLLM adapter calls them, the emulated engine
compiles the very same ones, so a rule that was examined is the rule that serves (DESIGN section 7).
"""
