"""Decision: states and the policy in force in, absolute commands with their reasons out."""
