"""The fast control's rules, compiled: the same functions that the vLLM adapter calls."""

from __future__ import annotations

from loadgen.engine.jit import kernel
from services.actuator.fast import admission, reservation, running_cap, shedding, watermark

can_meet = kernel(admission.can_meet)
deadline_s = kernel(admission.deadline_s)
first_token_in_s = kernel(admission.first_token_in_s)
prefill_ahead_tokens = kernel(admission.prefill_ahead_tokens)
prefill_rate = kernel(admission.prefill_rate)
next_cap = kernel(running_cap.next_cap)
smoothed_gap_s = kernel(running_cap.smoothed_gap_s)
expected_output_tokens = kernel(reservation.expected_output_tokens)
output_weight = kernel(reservation.weight)
hopeless = kernel(shedding.hopeless)
offload_bytes = kernel(watermark.offload_bytes)
