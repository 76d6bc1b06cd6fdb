"""Figures as SVG files that stand alone: readable in light and dark, the same bytes from the same records."""
