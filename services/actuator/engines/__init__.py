"""Adapters: one class per kind of engine, all speaking the engine protocol of ``schemas.engine``."""
