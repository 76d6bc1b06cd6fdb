"""Diagnostics and theory: is a support any good, when does it help, what do the bounds say. For understanding only.

**Privacy.** What touched an un-noised gradient is a `NonPrivate` value, goes to a file of its own and is computed
only when asked for. Nothing in training, methods, privacy or gradients can import this package.
"""
