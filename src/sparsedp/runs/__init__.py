"""A run on disk: the one place that knows its files, their formats and what binds them to each other."""
