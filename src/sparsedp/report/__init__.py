"""Reports: one self-contained HTML file about a run or a comparison. Public values only, unless asked otherwise."""

from sparsedp.report.write import write_report

__all__ = ["write_report"]
