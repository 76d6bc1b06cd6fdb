"""Experiments: settings of a run, grids of runs, the processes that run them, and the statistics over seeds."""
