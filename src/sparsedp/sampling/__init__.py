"""Drawing batches: which units take part in a step, and how their rows are loaded."""
