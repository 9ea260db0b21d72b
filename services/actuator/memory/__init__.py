"""The memory plane: pool, planner, mover, tiers (DESIGN section 5)."""
