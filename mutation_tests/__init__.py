"""Planted leaks: `python -m mutation_tests` spoils copies of the sources, and the tests named for each must fail."""
