"""Attacks on gradients that only the studies make: an image by optimisation, an input by least squares."""
