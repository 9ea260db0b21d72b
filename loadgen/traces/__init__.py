"""Readers of request traces: Azure, Mooncake, session tables (Weka), BurstGPT, ServeGen."""

from loadgen.traces.errors import TraceError
from loadgen.traces.reading import FORMATS, read, trace_info
from loadgen.traces.splits import azure_split, session_split

__all__ = ["FORMATS", "TraceError", "azure_split", "read", "session_split", "trace_info"]
