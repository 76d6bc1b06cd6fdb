"""Online methods: the support is drawn or ranked anew every epoch and shrinks as training goes on."""

from sparsedp.methods.clock import Refresh
from sparsedp.methods.method import Method, OffSupport
from sparsedp.methods.registry import register
from sparsedp.methods.schedules import Cooling
from sparsedp.methods.scores import Energy, RandomOrder, Ranked

register(
    Method(
        name="on-rand",
        summary="A fresh random support every epoch, gradually smaller: random sparsification.",
        paper="Zhu and Blaschko 2023, Alg. 1",
        warm_up=False,
        ranking=RandomOrder(),
        refresh=Refresh.EVERY_PERIOD,
        schedule=Cooling(),
        active_ratio=0.2,
        off_support=OffSupport.COASTS,
    )
)
register(
    Method(
        name="on-topk",
        summary="Every epoch the coordinates with the most denoised squared gradient in the last one.",
        paper="Zhang and Xie 2026, arXiv 2606.04375, Sec. 7.1",
        warm_up=False,
        ranking=Energy(),
        refresh=Refresh.EVERY_PERIOD,
        schedule=Cooling(),
        active_ratio=0.2,
        off_support=OffSupport.COASTS,
    )
)
register(
    Method(
        name="ranked",
        summary="Every epoch the coordinates with the largest summed gradient in the last one.",
        paper="Zhu and Blaschko 2023, Alg. 4",
        warm_up=False,
        ranking=Ranked(),
        refresh=Refresh.EVERY_PERIOD,
        schedule=Cooling(),
        active_ratio=0.2,
        off_support=OffSupport.COASTS,
    )
)
