"""Tables of the gallery, in Markdown, from the records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from types import MappingProxyType

from sparsedp_experiments.figures.plots.support import DATA, EPSILONS, FEW, at_epsilon, at_ratio
from sparsedp_experiments.figures.store import Record, Records
from sparsedp_experiments.figures.words import short, with_interval


def support(records: Records) -> str:
    """alpha_oracle and rho_sig at k/d = 0.2, every model and budget."""
    rows = []
    for name, title in DATA.items():
        for epsilon in EPSILONS:
            found = [at_ratio(record, 0.2)["by"] for record in at_epsilon(records[name], epsilon)]
            if found:
                rows.append([title, str(epsilon), str(len(found)), *_quality(found)])
    head = [
        "data, model", "ε", "seeds", "alpha, energy score", "alpha, coherent score", "rho_sig", "its null",
        "split version, energy score", "split version, coherent score",
    ]  # fmt: skip
    return markdown(head, rows)


def _quality(found: Sequence[Mapping[str, Mapping[str, float]]]) -> list[str]:
    energy = [by["energy"] for by in found]
    return [
        with_interval([by["alpha"] for by in energy]),
        with_interval([by["coherent"]["alpha"] for by in found]),
        with_interval([by["rho_sig"] for by in energy]),
        short(energy[0]["null"]),
        _split(energy),
        _split([by["coherent"] for by in found]),
    ]


def _split(found: Sequence[Mapping[str, float]]) -> str:
    told = [by["split"] for by in found if by["split"] is not None]
    if not told:
        return "too noisy"
    if len(told) == len(found):
        return with_interval(told)
    shown = with_interval(told) if len(told) > FEW else short(sum(told) / len(told))
    return f"{shown}, {len(told)} of {len(found)} seeds"


def ratios(records: Records) -> str:
    """alpha_oracle by the energy score over k/d."""
    rows = []
    for name, title in DATA.items():
        for epsilon in EPSILONS:
            found = at_epsilon(records[name], epsilon)
            if found:
                values = [
                    with_interval([s["by"]["energy"]["alpha"] for s in same])
                    for same in zip(*(r["supports"] for r in found), strict=True)
                ]
                rows.append([title, str(epsilon), *values])
    return markdown(["data, model", "ε", *(f"k/d = {r:g}" for r in (0.05, 0.1, 0.2, 0.4))], rows)


def freezing(records: Records) -> str:
    """How far from random the freezing was."""
    rows = [
        [
            str(r["point"]["epsilon"]),
            short(r["variance"]["as it was"] / _chance_variance(r)),
            short(r["variance"]["ranked without noise"] / _chance_variance(r)),
            short(r["overlap_with_clean"]),
            short(r["overlap_by_chance"]),
        ]
        for r in records["freezing"]
    ]
    head = [
        "ε", "variance of the count over random's", "same, ranked without noise",
        "share of the support the clean ranking agrees with", "by chance",
    ]  # fmt: skip
    return markdown(head, rows)


def _chance_variance(record: Record) -> float:
    return float(sum((1 - ratio) * ratio for ratio in record["active_ratios"]))


def symmetry(records: Records) -> str:
    """Lopsidedness along two runs."""
    rows = []
    for record in records["symmetry"]:
        for stop in record["stops"]:
            low = sum(p < 0.05 for p in stop["p_values"])
            rows.append(
                [
                    str(record["point"]["method"]),
                    str(stop["epoch"]),
                    with_interval(stop["lopsidedness"]),
                    short(sum(stop["by_chance_95"]) / len(stop["by_chance_95"])),
                    f"{low} of {len(stop['p_values'])}",
                    short(stop["progress"]),
                    short(stop["symmetry_error"]),
                    short(stop["near"]),
                ]
            )
    head = [
        "method", "epochs", "lopsidedness over planes", "95 % of symmetric clouds stay below", "planes with p < 0.05",
        "progress E⟨∇L, clipped g⟩", "of it by asymmetry, b", "P(‖ξ‖ < 3C/4)",
    ]  # fmt: skip
    return markdown(head, rows)


def wire(records: Records) -> str:
    """Bytes per step."""
    rows = [
        [
            str(r["point"]["method"]),
            f"{r['point']['active_ratio']:g}",
            f"{r['value_bytes'] / r['steps']:,.0f}",
            f"{r['one_support_bytes']:,}",
            f"{r['four_byte_indices']:,}",
            f"{(r['value_bytes'] + r['index_bytes']) / r['steps']:,.0f}",
            f"{r['dense_bytes'] / r['steps']:,.0f}",
            f"{100 * r['share']:.1f} %",
        ]
        for r in records["wire"]
    ]
    head = [
        "method", "k/d", "values a step", "one support, encoded", "as 4-byte indices", "all, a step", "dense, a step",
        "share",
    ]  # fmt: skip
    return markdown(head, rows)


def misranking(records: Records) -> str:
    """How loose the bounds are where misranking is 1 in 10 to 1 in 1000."""
    rows = []
    for record in records["misranking"]:
        for pair in record["pairs"]:
            if 1e-3 <= pair["energy"] <= 0.3:
                seen = pair["swapped"] / pair["draws"]
                bounds = [
                    f"{pair[n] / pair['energy']:,.1f} x" for n in ("chebyshev", "bernstein", "chernoff")
                ]
                rows.append(
                    [str(record["steps"]), f"{pair['strength']:g}", f"{pair['energy']:.4f}", f"{seen:.4f}", *bounds,
                     f"{pair['coherent']:.2g}"]
                )  # fmt: skip
    head = [
        "steps", "G²/ν²", "exact", "simulated", "Chebyshev over exact", "Remark B.1 over exact",
        "best exponential over exact", "coherent score, exact",
    ]  # fmt: skip
    return markdown(head, rows)


def theorem(records: Records) -> str:
    """Theorem 6.3 and Corollary 6.6 on both runs."""
    rows = []
    for name, title in (("bounds", "tuned: momentum 0.9, C = 0.1"), ("bounds-plain", "plain SGD, C = 1")):
        for record in records[name]:
            found = record["theorem"]
            terms = [found.get(n) for n in ("progress", "clipping_bias", "mini_batch", "dp_noise", "total")]
            rows.append(
                [
                    title,
                    short(record["largest_smoothness"]),
                    short(found["rate_times_smoothness"]),
                    *("-" if term is None else short(term) for term in terms),
                    short(found["projected_energy"]),
                    short(record["alpha_T"]),
                ]
            )
    head = [
        "run", "smoothness β", "η β", "progress", "clipping bias", "mini-batch", "DP noise", "bound",
        "measured mean ‖P∇L‖²", "alpha_T",
    ]  # fmt: skip
    return markdown(head, rows)


def costs(records: Records) -> str:
    """Seconds and memory of every diagnostic, the dearest study of each."""
    found: dict[str, list[tuple[float, float]]] = {}
    where: dict[str, set[str]] = {}
    for study, some in records.items():
        for record in some:
            for name, cost in record["costs"].items():
                found.setdefault(name, []).append((cost["seconds"], cost.get("megabytes", 0.0)))
                where.setdefault(name, set()).add(study)
    rows = [
        [
            name,
            ", ".join(sorted(where[name])),
            short(median(seconds for seconds, _ in values)),
            short(max(seconds for seconds, _ in values)),
            f"{max(megabytes for _, megabytes in values):,.0f}",
        ]
        for name, values in sorted(found.items())
    ]
    return markdown(["diagnostic", "studies", "seconds, median", "seconds, most", "extra MB, most"], rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    if not rows:
        return "*Not measured yet.*"
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


TABLES: Mapping[str, Callable[[Records], str]] = MappingProxyType(
    {
        "support": support, "ratios": ratios, "freezing": freezing, "symmetry": symmetry, "wire": wire,
        "misranking": misranking, "theorem": theorem, "costs": costs,
    }
)  # fmt: skip
