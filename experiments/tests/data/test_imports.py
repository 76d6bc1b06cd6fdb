"""Training stands apart from the loaders."""

import subprocess
import sys


def test_importing_fit_imports_neither_loaders_nor_what_they_read_pictures_with():
    script = (
        "import sys, sparsedp; sparsedp.fit, sparsedp.Trainer; "
        "print(*[name for name in sys.modules if name.startswith(('PIL', 'sparsedp_experiments'))])"
    )
    shown = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert shown.stdout.split() == []
