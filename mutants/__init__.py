"""Planted leaks: each is put into a copy of the sources, and the tests named for it must fail there.

`make mutants` runs them all and ends with `N caught, 0 missed`.
"""
