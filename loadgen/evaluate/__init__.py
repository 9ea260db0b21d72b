"""The examination of policies on held-out emulated fleets (`tidegate evaluate`, DESIGN section 7)."""
