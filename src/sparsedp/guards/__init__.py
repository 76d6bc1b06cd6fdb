"""Watching a user's model and data: samples must not mix, and nothing may keep private rows."""
