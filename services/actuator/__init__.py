"""The actuator: the only service that touches memory, one task a node, never trusting an acknowledgement."""
