"""The ablations of the random sparsification paper. Not private: epsilon is infinite.

With `active_ratio=1`, the default, they are plain noisy and plain clipped SGD; below 1 they sparsify at random.
"""

from sparsedp.methods.clock import Refresh
from sparsedp.methods.method import Method, OffSupport, Protection
from sparsedp.methods.registry import register
from sparsedp.methods.schedules import Cooling
from sparsedp.methods.scores import RandomOrder

register(
    Method(
        name="noisy-sgd",
        summary="NOT PRIVATE. Noise of a given standard deviation, no clipping.",
        paper="Zhu and Blaschko 2023, Alg. 2",
        warm_up=False,
        ranking=RandomOrder(),
        refresh=Refresh.EVERY_PERIOD,
        schedule=Cooling(),
        off_support=OffSupport.COASTS,
        protection=Protection.NO_CLIP,
    )
)
register(
    Method(
        name="clipped-sgd",
        summary="NOT PRIVATE. Clipping, no noise.",
        paper="Zhu and Blaschko 2023, Alg. 3",
        warm_up=False,
        ranking=RandomOrder(),
        refresh=Refresh.EVERY_PERIOD,
        schedule=Cooling(),
        off_support=OffSupport.COASTS,
        protection=Protection.NO_NOISE,
    )
)
