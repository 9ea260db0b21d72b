"""Training a policy on randomised emulated fleets (`tidegate train`)."""
