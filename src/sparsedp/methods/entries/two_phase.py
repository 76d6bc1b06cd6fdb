"""Two-phase methods: a dense warm-up ranks the coordinates, then only the best are trained."""

from sparsedp.methods.method import Method
from sparsedp.methods.registry import register
from sparsedp.methods.scores import BlockCoherent, Coherent, Energy, RandomOrder

register(
    Method(
        name="tp-topk",
        summary="Warm-up, then the coordinates with the most denoised squared gradient.",
        paper="Zhang and Xie 2026, arXiv 2606.04375, Alg. 1",
        warm_up=True,
        ranking=Energy(),
        active_ratio=0.2,
    )
)
register(
    Method(
        name="tp-coherent",
        summary="Warm-up, then the coordinates with the largest squared mean gradient.",
        paper="ours, after Zhang and Xie 2026, Sec. 5",
        warm_up=True,
        ranking=Coherent(),
        active_ratio=0.2,
    )
)
register(
    Method(
        name="tp-block-coherent",
        summary="Warm-up, then the largest squared means over short runs of steps.",
        paper="ours, after Zhang and Xie 2026, Sec. 5",
        warm_up=True,
        ranking=BlockCoherent(),
        active_ratio=0.2,
    )
)
register(
    Method(
        name="tp-rand",
        summary="Warm-up, then random coordinates: the control for tp-topk.",
        paper="Zhang and Xie 2026, arXiv 2606.04375, Sec. 7.1",
        warm_up=True,
        ranking=RandomOrder(),
        active_ratio=0.2,
    )
)
