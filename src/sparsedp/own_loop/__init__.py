"""Keeping one's own loop: `make_private` and what it hands out."""
