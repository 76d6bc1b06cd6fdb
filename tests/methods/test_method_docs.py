import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparsedp.methods.catalog import all_methods

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    "page", ["methods.md", pytest.param("adding-a-method.md", marks=pytest.mark.nightly)]
)
def test_the_code_on_the_page_runs_as_it_stands(page):
    """In a process of its own, since it registers a method."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    assert blocks
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_method_is_in_the_table_on_the_page():
    page = (DOCS / "methods.md").read_text()
    assert [method.name for method in all_methods() if f"| `{method.name}`" not in page] == []
