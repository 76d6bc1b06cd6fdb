"""The laboratory of sparsedp: the papers re-run, their theory, attacks, data sets and networks."""
