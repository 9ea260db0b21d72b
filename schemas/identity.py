"""Names and numbers that identify a message, a worker and an action.

Every bus message starts with the same five fields, in this order and without a shared base class
(a field added to an array-layout base would shift its children, and old bytes would no longer decode):

``node``            host name as operators know it
``boot_id``         wall-clock ns at telemetry's start, kept increasing across restarts; greater is newer
``step``            control period counter inside a boot
``schema_version``  :data:`SCHEMA_VERSION` of the sender
``t_ns``            the node's clock when the message's data was taken; deadlines and leases use it too
"""

from __future__ import annotations

from typing import NamedTuple, NewType

NodeId = NewType("NodeId", str)
WorkerId = NewType("WorkerId", str)
ActionId = NewType("ActionId", str)

SCHEMA_VERSION = 1
STEP_S = 2.0
STEP_NS = 2_000_000_000


class Order(NamedTuple):
    """(boot_id, step): compares as messages of one node are ordered; the greater is the newer."""

    boot_id: int
    step: int


class WorkerName(NamedTuple):
    """The parts of a worker id ``<node>/<gpu>/<name>``."""

    node: NodeId
    gpu: int
    name: str


def worker_id(node: str, gpu: int, name: str) -> WorkerId:
    """Join the parts; ValueError when a part would make the id ambiguous."""
    if not node or "/" in node:
        raise ValueError(f"node name {node!r}: expected a non-empty name without '/'")
    if gpu < 0:
        raise ValueError(f"gpu index {gpu}: expected 0 or more")
    if not name or "/" in name:
        raise ValueError(f"engine name {name!r}: expected a non-empty name without '/'")
    return WorkerId(f"{node}/{gpu}/{name}")


def parse_worker_id(text: str) -> WorkerName:
    """Split ``<node>/<gpu>/<name>``; ValueError says what was found."""
    parts = text.split("/")
    if len(parts) != 3 or not parts[0] or not parts[2] or not parts[1].isdigit():
        raise ValueError(f"worker id {text!r}: expected <node>/<gpu>/<name>, for example n0/0/w0")
    return WorkerName(NodeId(parts[0]), int(parts[1]), parts[2])


def card_of(worker: str) -> str:
    """The part of a worker's id that names its card: ``n0/0``."""
    return worker.rpartition("/")[0]


def parse_action_id(text: str) -> tuple[WorkerId, Order]:
    """Worker and order of an action; ValueError says what was found."""
    worker, _, order = text.rpartition("@")
    boot_id, _, step = order.partition(".")
    if not worker or not boot_id.isdigit() or not step.isdigit():
        raise ValueError(f"action id {text!r}: expected <worker>@<boot>.<step>, for example n0/0/w0@17.4")
    return WorkerId(worker), Order(int(boot_id), int(step))


def action_id(worker: str, boot_id: int, step: int) -> ActionId:
    """The id of the one action a worker gets in a step: a repeat of the step repeats the id."""
    return ActionId(f"{worker}@{boot_id}.{step}")
