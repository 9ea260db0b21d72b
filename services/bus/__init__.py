"""The message bus: one interface, a NATS and an in-memory implementation under one contract test."""

from services.bus.api import Bus, Delivery, KvEntry, Message, PullConsumer, Subscription

__all__ = ["Bus", "Delivery", "KvEntry", "Message", "PullConsumer", "Subscription"]
