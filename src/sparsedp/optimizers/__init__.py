"""Torch optimizers behind a support: what a release moves, and an average of it."""
