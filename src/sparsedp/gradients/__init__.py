"""Gradient engines: the clipped sum of per-unit gradients on a support."""
