"""The papers' figures from their records, as SVG files: `python -m sparsedp_experiments figures FOLDER`."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sparsedp_experiments.figures.study import FigureRecord, FigureRecords, load_studies, records_of_study
from sparsedp_experiments.runs.results import estimate

WARM_UPS: Mapping[str, str] = {
    "warmup-fashion-cnn": "Fashion-MNIST, CNN",
    "warmup-fashion-scattering": "Fashion-MNIST, scattering",
    "warmup-hospital": "Hospital table, logistic",
}
EPSILONS, SHOWN_EPSILON = (1, 3, 8), 3
RATIOS = (0.05, 0.1, 0.2, 0.4)
_WIDTH, _HEIGHT = 4.4, 3.2


def draw_all(folder: Path | str) -> list[str]:
    """Draw every figure whose studies have records; gives the files."""
    records = {study.name: records_of_study(study) for study in load_studies()}
    Path(folder).mkdir(parents=True, exist_ok=True)
    made = []
    for name, (studies, draw) in FIGURES.items():
        if all(records.get(study) for study in studies):
            path = Path(folder) / f"{name}.svg"
            draw(records).savefig(path, metadata={"Date": None})
            made.append(str(path))
    return made


def _sheet(panels: int, columns: int) -> tuple[Figure, list[Axes]]:
    rows = -(-panels // columns)
    figure = Figure((columns * _WIDTH, rows * _HEIGHT), layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for spare in places[panels:]:
        spare.set_axis_off()
    return figure, list(places[:panels])


def _seeded(
    axes: Axes, x: Sequence[float], columns: Sequence[Sequence[float]], label: str, line: str = "-"
) -> None:
    """The mean over seeds with its 95 % interval shaded; one column of values per seed."""
    found = [estimate([column[place] for column in columns]) for place in range(len(x))]
    (drawn,) = axes.plot(
        x, [one.mean for one in found], line, label=label, marker="." if line == "-" else None
    )
    if all(one.low is not None for one in found):
        low, high = [one.low or 0.0 for one in found], [one.high or 0.0 for one in found]
        axes.fill_between(x, low, high, color=drawn.get_color(), alpha=0.16, linewidth=0)


def _at(records: Sequence[FigureRecord], epsilon: float) -> list[FigureRecord]:
    return [record for record in records if record["point"]["epsilon"] == epsilon]


def _of_score(record: FigureRecord, score: str, what: str) -> list[float]:
    by_ratio = {found["ratio"]: found["by"][score] for found in record["supports"]}
    return [by_ratio[ratio][what] for ratio in RATIOS]


def concentration(records: FigureRecords) -> Figure:
    """TP-TopK, Fig. 1a: the share of energy in the largest coordinates."""
    figure, panels = _sheet(len(WARM_UPS), 3)
    for (name, title), axes in zip(WARM_UPS.items(), panels, strict=True):
        found = _at(records[name], SHOWN_EPSILON)
        axes.set(
            title=title, xlabel="largest coordinates", ylabel="share of energy", xscale="log", ylim=(0, 1)
        )
        for kind in ("mean gradient", "mini-batch gradients", "clipped"):
            columns = [one["concentration"][kind] for one in found if kind in one["concentration"]]
            _seeded(axes, found[0]["shares"], columns, kind)
        axes.plot(found[0]["shares"], found[0]["shares"], ":", label="random")
    panels[0].legend()
    return figure


def recovery(records: FigureRecords) -> Figure:
    """TP-TopK, Fig. 1b: gradient energy recovered by learned, random and oracle supports."""
    places = [(name, title, epsilon) for name, title in WARM_UPS.items() for epsilon in EPSILONS]
    figure, panels = _sheet(len(places), 3)
    for (name, title, epsilon), axes in zip(places, panels, strict=True):
        found = _at(records[name], epsilon)
        axes.set(
            title=f"{title}, ε = {epsilon}", xlabel="active ratio", ylabel="share of energy", xscale="log"
        )
        for kind, line in (("energy", "-"), ("coherent", "-"), ("random", ":"), ("oracle", "--")):
            _seeded(axes, found[0]["shares"], [one["recovery"][kind] for one in found], kind, line)
    panels[0].legend()
    return figure


def alpha(records: FigureRecords) -> Figure:
    """TP-TopK, Sec. 7.4: captured energy and rho_sig over the active ratio, by the energy score."""
    places = [(name, title, epsilon) for name, title in WARM_UPS.items() for epsilon in EPSILONS]
    figure, panels = _sheet(len(places), 3)
    for (name, title, epsilon), axes in zip(places, panels, strict=True):
        found = _at(records[name], epsilon)
        axes.set(title=f"{title}, ε = {epsilon}", xlabel="active ratio k/d", ylabel="share", xscale="log")
        axes.plot(RATIOS, RATIOS, ":", label="k/d")
        for what, label in (
            ("alpha", "alpha_oracle"),
            ("rho_sig", "rho_sig"),
            ("null", "rho_sig of pure noise"),
        ):
            _seeded(axes, RATIOS, [_of_score(one, "energy", what) for one in found], label)
        told = [one for one in found if None not in _of_score(one, "energy", "split")]
        if told:
            _seeded(axes, RATIOS, [_of_score(one, "energy", "split") for one in told], "split estimate")
    panels[0].legend()
    return figure


def freezing(records: FigureRecords) -> Figure:
    """RS, Fig. 12: how many coordinates were frozen how often."""
    found = records["freezing"]
    figure, panels = _sheet(len(found), 2)
    for record, axes in zip(found, panels, strict=True):
        title = f"ε = {record['point']['epsilon']}"
        axes.set(title=title, xlabel="epochs frozen", ylabel="coordinates", yscale="symlog")
        axes.plot([record["d"] * share for share in record["by_chance"]], label="at random (exact law)")
        for name, counts in record["histograms"].items():
            axes.plot(counts, label=name)
    panels[0].legend()
    return figure


def symmetry(records: FigureRecords) -> Figure:
    """RS, Fig. 6 to 9: gradient deviations on a random plane."""
    found = [(record["point"]["method"], stop) for record in records["symmetry"] for stop in record["stops"]]
    figure, panels = _sheet(len(found), 4)
    for (method, stop), axes in zip(found, panels, strict=True):
        x, y = np.array(stop["points"]).T
        axes.scatter(x, y, s=4, alpha=0.5)
        lopsided, chance = np.mean(stop["lopsidedness"]), np.mean(stop["by_chance"])
        axes.set(title=f"{method}, after {stop['epoch']} epochs", xlim=(-5, 5), ylim=(-5, 5))
        axes.set_xlabel(f"lopsided {lopsided:.2f}, by chance {chance:.2f}")
    return figure


def wire(records: FigureRecords) -> Figure:
    """RS, Sec. 5: bytes of sparse updates over those of dense ones."""
    figure, (axes,) = _sheet(1, 1)
    axes.set(xlabel="active ratio k/d", ylabel="share of dense bytes", xscale="log", yscale="log")
    for method in dict.fromkeys(one["point"]["method"] for one in records["wire"]):
        own = [one for one in records["wire"] if one["point"]["method"] == method]
        axes.plot([one["k"] / one["d"] for one in own], [one["share"] for one in own], "o-", label=method)
    axes.legend()
    return figure


def least_squares(records: FigureRecords) -> Figure:
    """RS, Theorem 5.1: squared error over that of dense gradients: simulated, in closed form, and the bound."""
    found = records["least-squares"]
    figure, panels = _sheet(len(found), 3)
    for record, axes in zip(found, panels, strict=True):
        rows = record["rates"]
        rates, unit = [row["rate"] for row in rows], rows[0]["closed"]
        axes.set(
            title=f"Image {record['point']['seed'] + 1}", xlabel="share frozen r", ylabel="error over dense"
        )
        for name in ("bound", "closed"):
            axes.plot(rates, [row[name] / unit for row in rows], label=name)
        errors = [1.96 * row["simulated_std"] / unit for row in rows]
        axes.errorbar(
            rates, [row["simulated"] / unit for row in rows], errors, fmt="o", label="simulated, 95 %"
        )
    panels[0].legend()
    return figure


def inversion(records: FigureRecords) -> Figure:
    """RS, Fig. 5: mean squared error of inverted gradients over sparsity and noise."""
    found = records["inversion"]
    ratios = sorted({attack["ratio"] for attack in found[0]["attacks"]})
    kinds = list(dict.fromkeys((one["clipping"], one["noise_multiplier"]) for one in found[0]["attacks"]))
    figure, (axes,) = _sheet(1, 1)
    axes.set(xlabel="active ratio", ylabel="mean squared error", xscale="log")
    for clipping, noise in kinds:
        columns = [[_mse(record, clipping, noise, ratio) for ratio in ratios] for record in found]
        _seeded(axes, ratios, columns, f"{clipping}, noise {noise:g}")
    axes.axhline(
        estimate([record["guess_mse"] for record in found]).mean, ls=":", label="mean training image"
    )
    axes.legend()
    return figure


def _mse(record: FigureRecord, *wanted: Any) -> float:
    of: dict[tuple[Any, ...], Any] = {
        (one["clipping"], one["noise_multiplier"], one["ratio"]): one["mse"] for one in record["attacks"]
    }
    return float(of[wanted])


def pictures(records: FigureRecords) -> Figure:
    """RS, Fig. 5: the reconstructions, a row for each picture."""
    found = [record for record in records["inversion"] if record["picture"]]
    figure, panels = _sheet(1, 1)
    rows = []
    for record in found:
        packed = [record["picture"], *(attack["picture"] for attack in record["attacks"])]
        shape = record["shape"][-2:]
        rows.append(
            np.hstack([np.frombuffer(base64.b64decode(one), np.uint8).reshape(shape) for one in packed])
        )
    panels[0].imshow(np.vstack(rows), cmap="gray", interpolation="none")
    first = (
        "original",
        *(f"{a['clipping']} {a['noise_multiplier']:g} {a['ratio']:g}" for a in found[0]["attacks"]),
    )
    side = found[0]["shape"][-1]
    panels[0].set_xticks([side * (place + 0.5) for place in range(len(first))], first, rotation=90)
    return figure


def misranking(records: FigureRecords) -> Figure:
    """TP-TopK, Prop. 5.3: probability that noise swaps a coordinate with a gradient and one without."""
    found = records["misranking"]
    figure, panels = _sheet(len(found), 2)
    for record, axes in zip(found, panels, strict=True):
        rows = record["pairs"]
        strengths = [row["strength"] for row in rows]
        axes.set(title=f"{record['steps']} warm-up steps", xlabel="G²/ν²", ylabel="probability")
        axes.set(xscale="log", yscale="log", ylim=(1e-4, 1.5))
        for name in ("energy", "coherent", "chebyshev", "bernstein", "chernoff"):
            axes.plot(strengths, [row[name] for row in rows], label=name)
        axes.plot(strengths, [row["swapped"] / row["draws"] for row in rows], "o", label="simulated")
    panels[0].legend()
    return figure


def along_runs(records: FigureRecords) -> Figure:
    """Prop. 5.1 (signal lost against noise saved) and RS's best rate r*, along two runs."""
    figure, panels = _sheet(4, 2)
    for place, name in enumerate(("bounds", "bounds-plain")):
        record = records[name][0]
        rows = [row for row in record["snapshots"] if row["step"] >= record["switch"]]
        steps, (sides, rate) = [row["step"] for row in rows], panels[2 * place : 2 * place + 2]
        sides.set(title=name, xlabel="step", ylabel="squared norm", yscale="log")
        for what in ("noise_saved", "signal_loss", "random_signal_loss", "clipped_energy"):
            sides.plot(steps, [row[what] for row in rows], label=what.replace("_", " "))
        rate.set(title=f"best rate r*, {name}", xlabel="step", ylabel="share frozen", ylim=(0, 1))
        for what in ("best_rate", "printed_rate"):
            rate.plot(steps, [row[what] for row in rows], label=what.replace("_", " "))
    for axes in panels[:2]:
        axes.legend()
    return figure


def theorem(records: FigureRecords) -> Figure:
    """TP-TopK, Theorem 6.3: the four terms along a plain SGD run and what they bound."""
    found: Mapping[str, Any] = records["bounds-plain"][0]["theorem"]
    names = ("progress", "clipping_bias", "mini_batch", "dp_noise", "total", "projected_energy")
    shown = {name: found[name] for name in names if found.get(name)}
    figure, (axes,) = _sheet(1, 1)
    axes.bar(list(shown), list(shown.values()))
    axes.set(ylabel="squared norm", yscale="log")
    axes.tick_params(axis="x", rotation=30)
    return figure


_WARM = tuple(WARM_UPS)
FIGURES: Mapping[str, tuple[tuple[str, ...], Callable[[FigureRecords], Figure]]] = {
    "concentration": (_WARM, concentration),
    "recovery": (_WARM, recovery),
    "alpha": (_WARM, alpha),
    "freezing": (("freezing",), freezing),
    "symmetry": (("symmetry",), symmetry),
    "wire": (("wire",), wire),
    "least-squares": (("least-squares",), least_squares),
    "inversion": (("inversion",), inversion),
    "inversion-pictures": (("inversion",), pictures),
    "misranking": (("misranking",), misranking),
    "along-runs": (("bounds", "bounds-plain"), along_runs),
    "theorem": (("bounds-plain",), theorem),
}
"""The figures, the studies each is drawn from, and how."""
