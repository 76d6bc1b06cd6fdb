"""Held-out data: scored exactly, outside the guarantee."""
