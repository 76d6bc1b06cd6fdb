"""One small file per family of methods; each registers its rows when the table is first asked for."""
