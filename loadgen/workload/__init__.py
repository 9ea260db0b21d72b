"""Workloads: what clients ask, when, and in which sessions.

``builtin`` generates one from published figures, ``loadgen.traces.read`` reads one from a file; its
methods change rate and length and share it out to workers, ``info`` describes it.
"""

from loadgen.workload.builtin import KINDS, builtin
from loadgen.workload.info import WorkloadInfo, info, render
from loadgen.workload.table import Workload, merged

__all__ = ["KINDS", "Workload", "WorkloadInfo", "builtin", "info", "merged", "render"]
