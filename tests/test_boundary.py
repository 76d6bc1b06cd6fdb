"""The boundary as structure: which packages may touch gradients, the seal of a release, and noise.

A package that has to be added below should be read by a second pair of eyes first.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "sparsedp"

USED_BY = {
    "gradients": (
        {"autograd", "vmap", "vjp", "jvp", "jacrev", "hessian", "backward", "clipped_sum", "retain_grad",
         "register_hook"},
        {"grad_sample", "validation", "privacy", "auditing", "federated", "cli", "integrations", "_private_loop"},
    ),
    "seal": ({"_SEAL"}, {"privacy", "testing"}),
    "noise": (
        {"rounded_gaussian", "add_rounded_gaussian", "RAND_bytes", "urandom", "getrandbits", "SystemRandom"},
        {"randomness", "rounded_gaussian", "privacy"},
    ),
}  # fmt: skip
"""Names, and the modules and packages that may use them."""

PUBLIC_ONLY = ["methods", "report", "optimizers", "callbacks", "results", "evaluation", "diagnostics", "runs"]
"""Modules and packages that see releases and public numbers only, and do not import the engine."""


@cache
def sources() -> list[tuple[str, str, ast.Module]]:
    """Path, top-level module or package, and tree of every file."""
    found = ((path, path.relative_to(SOURCE)) for path in sorted(SOURCE.rglob("*.py")))
    return [
        (at.as_posix(), at.parts[0].removesuffix(".py"), ast.parse(path.read_text())) for path, at in found
    ]


def names_used(tree: ast.Module) -> set[str]:
    """Attributes, names, imported names and modules, and names given to getattr and its kin."""
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            used.update((getattr(node, "module", None) or "").split("."))
            used.update(part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            used.update(str(a.value) for a in node.args if isinstance(a, ast.Constant))
    return used


@pytest.mark.parametrize("what", USED_BY)
def test_boundary_name_is_used_by_listed_packages_alone(what):
    names, packages = USED_BY[what]
    guilty = {
        path for path, package, tree in sources() if package not in packages and names_used(tree) & names
    }
    assert guilty == set()


@pytest.mark.parametrize("package", PUBLIC_ONLY)
def test_boundary_public_package_does_not_import_engine(package):
    guilty = {
        path
        for path, its, tree in sources()
        if its == package
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("sparsedp.grad_sample")
        and node.module not in ("sparsedp.grad_sample.query",)
    }
    assert guilty == set()


@pytest.mark.parametrize(
    "code", ["from torch.func import vmap as v", "torch.autograd.grad(x, y)", "getattr(loss, 'backward')()"]
)
def test_boundary_walk_sees_through_disguises(code):
    assert names_used(ast.parse(code)) & USED_BY["gradients"][0]
