"""Tests that need a GPU: skipped with a reason elsewhere."""
