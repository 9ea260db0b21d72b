"""Sources: where a node's numbers come from. Each yields readings; none knows the bus."""
