"""Reports: one self-contained HTML file about a run or a comparison. Public values only, unless asked otherwise.

What writes them is loaded when it is first used: the small modules here are for everyone.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsedp.report.write import write_report

__all__ = ["write_report"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sparsedp.report.write import write_report

    return write_report
