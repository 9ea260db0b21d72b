"""Small trace files, written where a test wants them."""

from __future__ import annotations

import gzip
from pathlib import Path

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.6805900,396,109
2023-11-16 18:15:50.1805900,879,55
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01.009930+00:00,2399,6
2024-05-10 02:00:02+02:00,100,7
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1300, "output_length": 50, "hash_ids": [1, 2, 3]}
{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [10, 11]}
{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [20, 21]}
{"timestamp": 30000, "input_length": 1900, "output_length": 70, "hash_ids": [1, 2, 4, 5]}
"""
SESSIONS = (
    "trace_id,subagent,t_s,type,prompt_tokens,output_tokens,think_time_s,api_time_s,ttft_s,stop,"
    "n_blocks64,prefix_hit_blocks64\n"
    """trace_0003,,0.0,n,1600,100,0.0,7.0,,tool_use,25,0
trace_0003,agent_001,2.0,n,900,30,0.0,2.0,,tool_use,14,0
trace_0003,agent_001,6.0,n,1100,20,3.0,4.0,,end_turn,17,14
trace_0003,,20.0,s,2000,50,,3.5,1.9,tool_use,31,25
trace_0003,,40.0,s,2200,0,9.0,,,,34,31
trace_0003,,60.0,s,1000,10,12.5,3.5,1.9,end_turn,15,4
trace_0007,,0.0,n,500,10,0.0,1.0,,end_turn,7,0
"""
)


def written(folder: Path, text: str | bytes, name: str = "trace", packed: bool = False) -> Path:
    """The path of a file with this content, gzipped if wanted."""
    raw = text.encode() if isinstance(text, str) else text
    path = folder / name
    path.write_bytes(gzip.compress(raw) if packed else raw)
    return path
