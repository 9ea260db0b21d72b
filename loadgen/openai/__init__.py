"""Load for any server that speaks the OpenAI API (vLLM, SGLang, ...): sessions in closed or open loop, traces, figures.

`python -m loadgen openai --url URL`, or from code: ``report = await drive(Options(url=..., sessions=4, requests=20))``.
"""

from loadgen.openai.comparing import Comparison, compare
from loadgen.openai.driving import drive
from loadgen.openai.options import Options
from loadgen.openai.records import RequestRecord, read_records
from loadgen.openai.report import Report

__all__ = ["Comparison", "Options", "Report", "RequestRecord", "compare", "drive", "read_records"]
