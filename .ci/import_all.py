"""Import every module of the installed package but those that need a package of somebody else's."""

from __future__ import annotations

import importlib
import pkgutil

import sparsedp

OPTIONAL = {"flwr", "lightning", "mlflow", "transformers", "peft", "accelerate", "opacus"}

count = 0
for module in pkgutil.walk_packages(sparsedp.__path__, "sparsedp."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in OPTIONAL:
            raise
    count += 1
for name in sparsedp.__all__:
    getattr(sparsedp, name)
print(f"{count} modules and {len(sparsedp.__all__)} names of sparsedp {sparsedp.__version__}")
