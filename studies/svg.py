"""An SVG file that stands alone."""

from __future__ import annotations

from sparsedp.report.markup import Attributes, Child, Html, tag


def svg_document(alt: str, width: int, height: int, style: str, *body: Child) -> str:
    """Markup with its style, named for those who do not see it, as the text of a file."""
    box: Attributes = {
        "xmlns": "http://www.w3.org/2000/svg",
        "viewBox": f"0 0 {width} {height}",
        "width": width,
        "height": height,
        "role": "img",
        "aria-label": alt,
    }
    return tag("svg", box, tag("style", None, Html(style)), *body).text + "\n"
