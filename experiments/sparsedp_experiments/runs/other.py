"""Experiments that are no grid of runs: what `sweep NAME` does for them."""

from __future__ import annotations

from collections.abc import Callable


def other_experiment(name: str) -> Callable[[], None] | None:
    """What makes the records of an experiment that is no grid, by name; None for all others."""
    if name == "rs-table3":
        from sparsedp_experiments.runs.partition import train_missing

        return train_missing
    if name == "adadpigu-table3":
        from sparsedp_experiments.runs.partition import noise_table

        return lambda: print("\n".join(noise_table()))
    if name == "audit":
        from sparsedp_experiments.attacks.audits import audit_missing

        return audit_missing
    if name == "table-rates":
        from sparsedp_experiments.tabular_rates import simulate_missing

        return simulate_missing
    from sparsedp_experiments.figures.study import load_studies, measure_missing

    study = next((study for study in load_studies() if study.name == name), None)
    if study is None:
        return None
    return lambda: measure_missing([study])
