"""`python -m sparsedp`, and so `torchrun -m sparsedp`."""

from sparsedp.cli import main

main()
