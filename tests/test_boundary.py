"""The boundary, made structural: who may touch raw gradients, the seal and randomness is a list, and here it is.

A file that has to be added below should be read by a second pair of eyes first. (That `Released` cannot be built
without the seal is tested in privacy/test_released.py.)
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "sparsedp"

RAW_GRADIENTS = {
    "grad": {
        "diagnostics/curvature.py",  # Hessian-vector products, on request
        "federated/local.py",  # a client's own, at the client: what leaves it is clipped first
        "grad_sample/layers/shared.py",
        "grad_sample/reference.py",
        "grad_sample/tape.py",
        "optimizers/sparse.py",  # asks of a frozen parameter whether there is one
        "optimizers/sparse.py",  # hands the released gradient to the optimizer
        "optimizers/sparse.py",  # as well
        "optimizers/noise_aware.py",  # optimizers: they are handed it
        "own_loop/trained.py",  # asks whether the user's own code has left one
    },
    "vmap": {"grad_sample/isolation.py"},
    "backward": {
        "grad_sample/bookkeeping.py",
        "integrations/lightning.py",  # a loop of make_private: what it is called on is never computed
    },
    "autograd": {
        "diagnostics/curvature.py",
        "federated/local.py",
        "grad_sample/bookkeeping.py",
        "grad_sample/forward.py",
        "grad_sample/graph.py",
        "grad_sample/hooks.py",
        "grad_sample/layers/operations.py",
        "grad_sample/layers/shared.py",
        "grad_sample/reading.py",
        "grad_sample/recurrent/nodes.py",
        "grad_sample/tape.py",
    },
    "get_gradient_edge": {"grad_sample/graph.py", "grad_sample/tape.py"},
    "clipped_sum": {
        "auditing/sensitivity.py",  # sums with and without a unit, what the attacker knows; not for release
        "diagnostics/oracle.py",
        "grad_sample/bookkeeping.py",
        "privacy/mechanism.py",
    },
    "vjp": set(),
    "jvp": set(),
    "jacrev": set(),
    "jacfwd": set(),
    "hessian": set(),
    "retain_grad": set(),
    "register_hook": {
        "grad_sample/hooks.py"
    },  # to see whether a model has some; registers nothing that stays
    "register_full_backward_hook": set(),
    "register_post_accumulate_grad_hook": set(),
}
"""Ways to get at a gradient before the mechanism has seen it. What diagnostics get is marked `NonPrivate`."""

THE_SEAL = {
    "_SEAL": set(),
    "__new__": {"validation/reads.py"},  # a watched copy of a data set
    "__setattr__": {
        "privacy/normalization.py",  # what is asked of a plan, plans and phases check and convert their own fields
        "privacy/plan.py",
        "privacy/mechanism.py",
    },
}
"""The seal beyond its definition in privacy/mechanism.py, and ways around a constructor or a read-only object."""

RANDOM_DRAWS = {
    "normal": {
        "datasets/zipf.py",  # public: made-up data
        "diagnostics/curvature.py",  # public: where power iteration starts
        "diagnostics/oracle.py",  # public: random projections and sign flips
        "diagnostics/symmetry.py",  # public: sign flips
        "methods/support_scheduler.py",  # public noise on frozen coordinates (RS Alg. 4)
    },
    "rounded_gaussian": {"randomness.py", "privacy/mechanism.py"},
    "add_rounded_gaussian": {"randomness.py", "privacy/mechanism.py"},
    "standard_normal": {"randomness.py"},
    "default_rng": set(),
    "RAND_bytes": {"randomness.py"},
    "urandom": set(),
    "PCG64": {"randomness.py"},
    "random_raw": {"randomness.py"},
    "randn": {"training/data.py"},  # made-up public rows to look at a frozen body; no noise of a release
    "randn_like": set(),
    "normal_": set(),
    "rand": set(),
    "rand_like": set(),
    "multinomial": set(),
    "bernoulli": {
        "auditing/canaries.py",
        "federated/picking.py",
        "ranks/follower.py",  # hands on, so that it can refuse noise
        "sampling.py",
    },
    "bernoulli_": set(),
    "uniform_": set(),
    "randperm": set(),
    "gauss": set(),
    "normalvariate": set(),
}
"""Ways to draw noise or a sample; initial weights (models/) are the layers' own."""

NO_GRADIENTS_IN = ["core", "sampling", "datasets", "methods", "models", "report", "cli"]
"""Packages that do not import the gradient engine."""


@cache
def files() -> list[tuple[str, ast.Module]]:
    return [
        (path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(SOURCE.rglob("*.py"))
    ]


def names_used(tree: ast.Module) -> Iterator[str]:
    """Attributes, imported names and modules, and names given to getattr and its kin."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (getattr(node, "module", None) or "").split(".")
            yield from (part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            yield from (str(a.value) for a in node.args if isinstance(a, ast.Constant))


def modules_imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("table", [RAW_GRADIENTS, THE_SEAL, RANDOM_DRAWS], ids=["gradients", "seal", "draws"])
def test_only_the_listed_files_use_it(table):
    found: dict[str, set[str]] = {name: set() for name in table}
    for path, tree in files():
        for name in set(names_used(tree)) & found.keys():
            found[name].add(path)
    assert found == table  # a file too many: remove the use; one too few: shorten the list


def test_released_values_are_made_in_one_place():
    makers = {
        path
        for path, tree in files()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Released"
    }
    assert makers == {"privacy/mechanism.py"}


@pytest.mark.parametrize("package", NO_GRADIENTS_IN)
def test_the_package_does_not_import_the_gradient_engine(package):
    guilty = {
        path
        for path, tree in files()
        if path.startswith(f"{package}/")
        and path != "cli/check.py"  # times a sum of made-up examples, and throws it away
        and any(name.startswith("sparsedp.grad_sample") for name in modules_imported(tree))
    }
    assert guilty == set()


def test_training_does_not_import_diagnostics():
    guilty = {
        path
        for path, tree in files()
        if path.startswith(
            (
                "training/",
                "own_loop/",
                "callbacks.py",
                "privacy/",
                "methods/",
                "grad_sample/",
                "core/",
            )
        )
        and any(name.startswith("sparsedp.diagnostics") for name in modules_imported(tree))
    }
    assert guilty == set()


def test_the_walk_sees_through_disguises():
    disguises = [
        "import torch.func",
        "from torch.func import vmap as v",
        "torch.autograd.grad(x, y)",
        "getattr(loss, 'backward')()",
        "from torch import autograd",
    ]
    for code in disguises:
        used = set(names_used(ast.parse(code)))
        assert used & (RAW_GRADIENTS.keys() | {"func"}), code
