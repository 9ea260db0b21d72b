"""A step like the one before: the same commands to engines that do not wait, which answer the same.

Most steps of most nodes change nothing. Refusals, plans and effective quotas are then those of the step before,
and all that is left is to renew the leases and to see that the engines still say what they said. Makes no plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from schemas.actions import ActionBatch, left_alone
from schemas.engine import Receipt, SetQuota
from schemas.outcomes import OutcomeBatch
from services.actuator.engines.protocol import Engine
from services.actuator.leases import LATENCY_AT_LIMIT
from services.errors import EngineRefused, EngineUnreachable


class Said(NamedTuple):
    """What passed between the actuator and an engine."""

    engine: Engine
    order: SetQuota
    answer: Receipt


class Quiet(NamedTuple):
    """A step in which every command was accepted and nothing moved; rows in the order of the batch's workers."""

    batch: ActionBatch
    outcomes: OutcomeBatch
    said: Sequence[Said]

    async def repeat(self, batch: ActionBatch) -> OutcomeBatch | None:
        """Give ``batch`` to the engines if it commands what the step did. None: it commands something else, or an
        engine answers something else, and the step is to be taken the long way; commands are absolute, so those
        that were given already do nothing there."""
        before = self.batch
        if (
            batch.actions != before.actions
            or batch.target_rho != before.target_rho
            or batch.target_max_running != before.target_max_running
            or batch.base_generations != before.base_generations
            or batch.workers != before.workers
            or LATENCY_AT_LIMIT in batch.mask_reasons
        ):
            return None
        if (batch.holds != before.holds or batch.orders != before.orders) and left_alone(batch) != left_alone(before):
            return None
        boot_id, step, lease_ns, deadline_ns = batch.boot_id, batch.step, batch.lease_ns, batch.deadline_ns
        # schemas.identity.action_id, with its part that is the same for all workers made once.
        suffix = f"@{boot_id}.{step}"
        t_ns = batch.t_ns
        try:
            for engine, order, answer in self.said:
                engine_ns = engine.t_ns
                if engine_ns > deadline_ns or engine_ns >= lease_ns:
                    return None
                renewed = SetQuota(
                    boot_id, step, engine.worker + suffix, order.rho, order.soft_bytes, order.hard_bytes,
                    order.max_running, order.generation, lease_ns, deadline_ns,
                )  # fmt: skip
                now = await engine.set_quota(renewed)
                if (
                    now.generation != answer.generation
                    or now.rho != answer.rho
                    or now.mapped_bytes != answer.mapped_bytes
                    or now.quota_hard_bytes != answer.quota_hard_bytes
                    or now.quota_soft_bytes != answer.quota_soft_bytes
                    or now.max_running != answer.max_running
                ):
                    return None
                if engine.t_ns > t_ns:
                    t_ns = engine.t_ns
        except (EngineRefused, EngineUnreachable):
            return None
        return msgspec.structs.replace(
            self.outcomes,
            boot_id=boot_id,
            step=step,
            t_ns=t_ns,
            policies=batch.policies,
            policy_index=batch.policy_index,
            probabilities=batch.probabilities,
            masks=batch.masks,
            holds=batch.holds,
        )
