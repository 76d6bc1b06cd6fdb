"""AdaDPIGU: importance-based gradient updates with adaptive standardization."""

from sparsedp.methods.method import GeometryRule, Method
from sparsedp.methods.registry import register
from sparsedp.methods.schedules import Release
from sparsedp.methods.scores import Magnitude

register(
    Method(
        name="adadpigu",
        summary="Warm-up, then the coordinates of largest mean magnitude, clipped in standardized space.",
        paper="Zhang and Xie 2025, Alg. 1 and 2",
        warm_up=True,
        ranking=Magnitude(),
        schedule=Release(),
        active_ratio=0.6,
        geometry=GeometryRule.STANDARDIZED,
    )
)
