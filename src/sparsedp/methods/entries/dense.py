"""The dense baseline."""

from sparsedp.methods.method import Method
from sparsedp.methods.registry import register

register(
    Method(
        name="dp-sgd",
        summary="Every coordinate, all the time: the dense baseline.",
        paper="Abadi et al. 2016",
        warm_up=False,
        ranking=None,
    )
)
