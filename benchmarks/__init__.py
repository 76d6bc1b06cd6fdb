"""Benchmarks of the library against plain SGD and Opacus."""
