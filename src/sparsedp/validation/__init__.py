"""Refuses what would break the sensitivity of a step: data sets that mix units, state that remembers examples."""
