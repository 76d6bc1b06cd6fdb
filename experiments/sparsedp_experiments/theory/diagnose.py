"""A finished run under the papers' theory: what its releases say, and what un-noised gradients show.

`theory_of` reads releases and public numbers only. `diagnose_nonprivate` measures un-noised gradients at the run's
final weights: it is not private, and its values go into `nonprivate.json` of the run's folder and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, final

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from sparsedp._files import write_json
from sparsedp.batch import LossFunction, MicroBatch, per_sample_loss
from sparsedp.clipping import FlatClip
from sparsedp.diagnostics import (
    RunView,
    WarmupStatistics,
    shown_size,
    split_concentration,
    statistics_of,
)
from sparsedp.distributed import require_one_process
from sparsedp.errors import SparseDPError
from sparsedp.grad_sample import make_engine
from sparsedp.methods.support_scheduler import noise_on_mean
from sparsedp.privacy.plan import Phase
from sparsedp.randomness import PublicRandomness
from sparsedp.runs.run import Run, load_weights
from sparsedp_experiments.data.bundle import Split
from sparsedp_experiments.runs.execute import check, load_data, loss_of, model_of, moments_in
from sparsedp_experiments.runs.settings import Settings, settings_of_run
from sparsedp_experiments.theory.bounds import (
    Descent,
    alignment_bound,
    best_rate_at_most,
    budget_bound,
    kappa,
    noisy_bound,
    private_alignment_bound,
    progress_measure,
    projected_bound,
    retained_energy,
    retention_bound,
)
from sparsedp_experiments.theory.communication import BytesSent, encode_values, traffic
from sparsedp_experiments.theory.criteria import (
    concentration_curve,
    energy_captured,
    one_step,
    random_capture,
    recovery_curve,
)
from sparsedp_experiments.theory.misranking import (
    Pair,
    misranking_bernstein,
    misranking_chebyshev,
    misranking_coherent,
    misranking_energy,
)
from sparsedp_experiments.theory.oracle import (
    asymmetry_p_value,
    clipping_report,
    deviations,
    lopsidedness,
    lopsidedness_by_chance,
    mean_gradient,
    mean_loss,
    projected_deviations,
    smoothness,
    symmetry_error,
)
from sparsedp_experiments.theory.trajectory import Waypoint, energy_capture, measure, read_snapshots

NONPRIVATE, DRAWN = "nonprivate.json", "nonprivate.svg"
BANNER = (
    f"Not private: computed from the run's data without noise. The results go to RUN/{NONPRIVATE} and into no other "
    "file. Do not publish them or choose anything by them."
)
RATE_REMARK = (
    "Bounds: the learning rate is taken as eta/(1 - momentum), the least loss as zero, the smoothness as that of the "
    "final weights, and the largest deviation as that of the units looked at. They say what theory promises a run "
    "like this, not how it did."
)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_BATCH = 128
_ROWS_KEY = (3,)


@final
@dataclass(frozen=True, slots=True)
class Theory:
    """What the papers' bounds say of a run, from releases and public numbers.

    Attributes:
        odds: by ranking, how likely the warm-up's noise is to swap an average active coordinate with an average
            frozen one: exactly for the energy and the coherent score, and by the bounds of TP-TopK's Prop. 5.3 and
            Remark B.1; only where the split estimate tells the two kinds apart.
        wire: bytes of an update on the last support, its indices spread over the steps between two refreshes.
        best_rate_at_most: a bound on RS's r*, the best share of frozen coordinates; None without clip or noise.
    """

    odds: Mapping[str, Mapping[str, float]]
    wire: BytesSent
    best_rate_at_most: float | None

    def to_json(self) -> dict[str, Any]:
        wire = {**asdict(self.wire), "per_step": self.wire.per_step, "share": self.wire.share}
        return {"odds": dict(self.odds), "wire": wire, "best_rate_at_most": self.best_rate_at_most}

    def lines(self) -> list[str]:
        said = [
            f"Ranking {name}: noise swaps an active and a frozen coordinate with chance {odds['energy']:.2g} by "
            f"energy, {odds['coherent']:.2g} by the coherent score (bound of Remark B.1: {odds['bernstein']:.2g})."
            for name, odds in self.odds.items()
        ]
        said.append(f"An update takes {self.wire.per_step:,.0f} bytes, {self.wire.share:.1%} of a dense one.")
        if self.best_rate_at_most is not None:
            said.append(
                f"By RS's bound freezing more than {self.best_rate_at_most:.1%} cannot pay at this noise."
            )
        return said


def theory_of(folder: Path | str) -> Theory:
    """What the theory says of the run in a folder.

    Raises:
        DataError: there is no run, or one of its files is damaged.
    """
    run = Run.open(folder)
    view = RunView.of(run)
    found = None if run.warmup is None else statistics_of(run)
    odds = (
        {} if found is None else {name: _odds(found, name, shown_size(view.support)) for name in found.splits}
    )
    return Theory({name: one for name, one in odds.items() if one is not None}, _wire(view, run), _rate(view))


def _odds(found: WarmupStatistics, ranking: str, size: int) -> dict[str, float] | None:
    split = found.splits[ranking]
    concentration, left = split_concentration(split, size), split.dimension - size
    if concentration.share is None or not left or not found.noise_std:
        return None
    inside = concentration.share.value * concentration.total.value
    larger = math.sqrt(max(inside, 0.0) / size)
    smaller = math.sqrt(max(concentration.total.value - inside, 0.0) / left)
    if not smaller < larger:
        return None
    pair = Pair(larger, smaller, found.noise_std, found.planned)
    return {
        "larger": larger,
        "smaller": smaller,
        "energy": misranking_energy(pair),
        "coherent": misranking_coherent(pair),
        "chebyshev": min(1.0, misranking_chebyshev(pair)),
        "bernstein": misranking_bernstein(pair),
    }


def _wire(view: RunView, run: Run) -> BytesSent:
    """Encode the last support and the weights on it, as many times as it was used."""
    flat = torch.cat([run.weights[slot.name].reshape(-1).float() for slot in run.layout])
    phase = view.plan.phases[-1]
    refreshes = sum(span.step >= view.plan.first_step(phase.name) for span in run.spans)
    steps = max(1, phase.steps // max(1, refreshes))
    return traffic([view.support] * steps, [encode_values(view.support.gather(flat))] * steps)


def _rate(view: RunView) -> float | None:
    phase = view.plan.phases[-1]
    if phase.clip_norm is None or not phase.noise_multiplier > 0:
        return None
    d, batch = view.support.dimension, view.plan.expected_batch_size(phase)
    return best_rate_at_most(noise_multiplier=phase.gradient_noise, dimension=d, batch_size=batch)


def diagnose_run(
    folder: Path, side: Literal["test", "train"] | str, rows: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure a run that the laboratory trained, on at most `rows` rows of one side of its data. Not private."""
    settings = check(Settings.from_json(settings_of_run(folder)))
    bundle = load_data(settings)
    split = {"test": bundle.test, "train": bundle.train}[side]
    units = None if settings.unit == "row" else split.units
    shape, classes = bundle.input_shape, len(bundle.classes)
    model, fresh = (model_of(settings, shape, classes, bundle.vocabulary) for _ in range(2))
    if moments_in(model) is not None:
        raise SparseDPError(
            "least squares: got a run whose loss is linear in its weights, expected one with gradients that change "
            "as it trains: there is no curvature, support or progress to measure"
        )
    if rows < 2:
        raise SparseDPError(f"rows: got {rows}, expected at least 2")
    batches = _batches(split, units, choose_rows(len(split), units, settings.rows_per_unit, rows))
    loss = per_sample_loss(loss_of(model))
    found = diagnose_nonprivate(folder, model, loss, batches, PublicRandomness(0), say, fresh=fresh)
    _draw(folder, found["figures"])
    return found


def _draw(folder: Path, figures: Sequence[Mapping[str, Any]]) -> None:
    """Draw the curves beside the file, under a banner."""
    figure = Figure((7, 3.2 * len(figures)), layout="constrained")
    figure.suptitle(BANNER.partition(". ")[0], color="red")
    for entry, axes in zip(figures, figure.subplots(len(figures), squeeze=False).flat, strict=True):
        for line in entry["series"]:
            axes.plot(line["x"], line["y"], "-o", markersize=3, label=line["name"])
        axes.set(title=entry["title"], xlabel=entry["x"], ylabel=entry["y"])
        axes.legend()
    figure.savefig(folder / DRAWN)


def choose_rows(count: int, units: Tensor | None, per_unit: int, most: int) -> Tensor:
    """At most `most` of `count` rows at random, at most `per_unit` of each unit; rows of a unit stand together."""
    order = PublicRandomness(0).permutation(count, _ROWS_KEY)
    if units is None:
        return order[:most]
    owner = units[order]
    by_owner = torch.sort(owner, stable=True).indices
    sorted_owner = owner[by_owner]
    place = torch.empty_like(by_owner)
    place[by_owner] = torch.arange(count) - torch.searchsorted(sorted_owner, sorted_owner)
    kept = order[place < per_unit][:most]
    return kept[torch.sort(units[kept], stable=True).indices]


def _batches(split: Split, units: Tensor | None, chosen: Tensor) -> list[MicroBatch]:
    """Micro-batches of whole units."""
    if units is None:
        return [MicroBatch(split.rows_at(part)) for part in torch.split(chosen, _BATCH)]
    number = torch.unique_consecutive(units[chosen], return_inverse=True)[1]
    return [
        MicroBatch(split.rows_at(chosen[inside]), number[inside] - number[inside][0])
        for first in range(0, int(number[-1]) + 1, _BATCH)
        for inside in [(number >= first) & (number < first + _BATCH)]
    ]


# How much the slow parts look at: rows of the smoothness, rows whose units are looked at one by one, the same at each
# snapshot, numbers in the matrix of deviations (units times d), most units in it.
_CURVATURE_ROWS, _UNIT_ROWS, _SNAPSHOT_ROWS = 512, 1024, 256
_DEVIATIONS, _DEVIATING_UNITS = 2**24, 256


@dataclass(slots=True)
class _Findings:
    """Values by name, curves for the report, and what could not be computed."""

    values: dict[str, float] = field(default_factory=dict)
    figures: list[dict[str, Any]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def draw(
        self, title: str, x: str, y: str, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    ) -> None:
        series = [{"name": name, "x": list(xs), "y": list(ys)} for name, (xs, ys) in lines.items()]
        self.figures.append(
            {"title": title, "kind": "lines", "note": BANNER, "x": x, "y": y, "series": series}
        )

    def write(self, folder: Path | str) -> dict[str, Any]:
        """Into the run's file; a value that is not finite, as diverged weights give, is left out with a remark."""
        lost = [name for name, value in self.values.items() if not math.isfinite(value)]
        document = {
            "format": 1,
            "values": [
                {"name": n, "value": v, "note": BANNER} for n, v in self.values.items() if n not in lost
            ],
            "figures": self.figures,
            "remarks": [
                *self.remarks,
                *(f"Not a finite number, so left out: {name}. Have the weights diverged?" for name in lost),
            ],
        }
        write_json(Path(folder) / NONPRIVATE, document)
        return document


def diagnose_nonprivate(
    folder: Path | str,
    model: nn.Module,
    loss: LossFunction,
    batches: Sequence[MicroBatch],
    public: PublicRandomness,
    say: Callable[[str], None] = lambda _: None,
    *,
    fresh: nn.Module | None = None,
) -> dict[str, Any]:
    """Measure a finished run with un-noised gradients at its final weights; gives what `nonprivate.json` then holds.

    Args:
        folder: of the run.
        model: of the run's architecture; gets its weights, and evaluation mode.
        loss: the per-example loss.
        batches: rows to measure on: held-out ones for the support's quality (TP-TopK, Sec. 7.4).
        public: where power iteration, projections and masks come from.
        say: told what is being done.
        fresh: a model as the run began; without one, and without snapshots, there are no bounds.

    **Privacy.** The file is not private, whatever rows were used; nothing of it flows back.
    """
    require_one_process("the diagnosis")
    view, found = RunView.of(Run.open(folder)), _Findings()
    load_weights(folder, model)
    model.eval()
    engine, phase = make_engine(model, loss), view.plan.phases[-1]
    say("gradients at the final weights")
    gradient = mean_gradient(engine, batches)
    _capture(found, gradient, view)
    few = _some(batches, _UNIT_ROWS)
    beta = smoothness(model, loss, _some(batches, _CURVATURE_ROWS), public).value
    found.values["smoothness (largest curvature)"] = beta
    points = projected_deviations(engine, few, public)
    chance = lopsidedness_by_chance(points, public)
    found.values |= {
        "lopsidedness of gradient deviations (0 to 1)": lopsidedness(points),
        "lopsidedness of a symmetric cloud, 95 % point": float(chance[round(0.95 * (len(chance) - 1))]),
        "p-value of symmetry": asymmetry_p_value(points, public),
    }
    if phase.clip_norm is None:
        found.remarks.append("No bounds: this run did not clip.")
        return found.write(folder)
    say("clipping")
    clip = FlatClip(phase.clip_norm)
    clipped = mean_gradient(engine, batches, clip)
    step = one_step(clipped, view.support, noise_on_mean(view.plan, phase))
    retained = retained_energy(clipped, view.support)
    report = clipping_report(engine, few, view.support, clip)
    found.values |= {
        "signal loss of the support": step.signal_loss,
        "noise saved by the support": step.noise_saved,
        "energy retained by the support (AdaDPIGU, alpha)": retained,
        "clipping bias": report.bias,
        "bound on the clipping bias (Lemma 6.4)": report.bias_bound,
        "variance of a clipped gradient": report.unit_variance,
        "share of units that are clipped": float((report.norms > clip.norm).double().mean()),
    }
    snapshots = read_snapshots(folder)
    along: tuple[Waypoint, ...] = ()
    if snapshots:
        say("gradients along the run")
        along = measure(model, loss, snapshots, _some(batches, _SNAPSHOT_ROWS), clip)
        _trajectory(found, along, view.support.dimension)
    if not along and fresh is None:
        found.remarks.append("No bounds: the loss at the start of the run is not known.")
        return found.write(folder)
    say("deviations and bounds")
    start = along[0].loss if along or fresh is None else mean_loss(fresh.eval(), loss, batches)
    most = max(2, min(_DEVIATING_UNITS, _DEVIATIONS // view.support.dimension))
    mean, rows = deviations(engine, batches, most)
    measurable = progress_measure(mean, rows, clip.norm) > 0
    rate = 1 - view.support.active_ratio
    measured = Measured(
        smoothness=beta,
        start_loss=start,
        end_loss=mean_loss(model, loss, batches),
        retained=retained,
        captured=energy_capture(along) if along else energy_captured(gradient**2, view.support),
        largest_deviation=float(torch.linalg.vector_norm(rows, dim=1).max()),
        symmetry_error=symmetry_error(mean, rows, clip),
        kappa=kappa(mean, rows, clip.norm, rate, public) if measurable else None,
        squared_biases=tuple(point.bias**2 for point in along) or (report.bias**2,),
        unit_variance=max((point.unit_variance for point in along), default=report.unit_variance),
    )
    found.values |= {"loss where the run began": start, "loss at the final weights": measured.end_loss}
    values, remarks = bounds_of(measured, view)
    found.values |= values
    found.remarks += remarks
    return found.write(folder)


def _some(batches: Sequence[MicroBatch], rows: int) -> list[MicroBatch]:
    """The first batches that hold at least so many rows."""
    kept: list[MicroBatch] = []
    for batch in batches:
        if sum(one.example_count for one in kept) >= rows:
            break
        kept.append(batch)
    return kept


def _capture(found: _Findings, gradient: Tensor, view: RunView) -> None:
    """`alpha_oracle` against random supports, the energy concentration and the recovery curve (TP-TopK, Fig. 1)."""
    energies, support = gradient**2, view.support
    low, high = random_capture(energies, support.size).interval()
    found.values |= {
        "gradient energy on the support (alpha_oracle)": energy_captured(energies, support),
        "random support, lower end of 95 %": low,
        "random support, upper end of 95 %": high,
        "squared gradient norm": float(energies.sum()),
    }
    top = concentration_curve(energies, SHARES)
    lines = {"largest coordinates": (SHARES, top), "random coordinates": (SHARES, SHARES)}
    found.draw("Energy concentration", "share of coordinates", "share of energy", lines)
    if view.scores is not None:
        order = torch.sort(view.scores, descending=True, stable=True).indices
        curve = recovery_curve(energies, order, SHARES)
        lines = {
            "ranked by the run": (SHARES, tuple(point.learned for point in curve)),
            "random": (SHARES, tuple(point.random.mean for point in curve)),
            "oracle": (SHARES, tuple(point.oracle for point in curve)),
        }
        found.draw("Energy recovered", "active ratio", "share of energy", lines)


def _trajectory(found: _Findings, points: Sequence[Waypoint], dimension: int) -> None:
    """`alpha_T` (TP-TopK, Def. 6.5), and how captured energy and clipping bias went along the run."""
    found.values["energy captured along the run (alpha_T)"] = energy_capture(points)
    moving = [point for point in points if point.energy > 0]
    steps = [float(point.step) for point in moving]
    lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        "on the support": (steps, [point.captured / point.energy for point in moving]),
        "random support, k/d": (steps, [point.active / dimension for point in moving]),
    }
    found.draw("Energy captured along the run", "step", "share of energy", lines)
    steps = [float(point.step) for point in points]
    lines = {
        "clipping bias": (steps, [point.bias for point in points]),
        "its bound (Lemma 6.4)": (steps, [point.bias_bound for point in points]),
        "gradient norm on the support": (steps, [point.captured**0.5 for point in points]),
    }
    found.draw("Clipping along the run", "step", "norm", lines)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the bounds need from un-noised gradients: at the final weights, or the largest seen where the run was.

    `retained` and `captured` are shares of energy on the support, of the clipped gradient and of the whole one
    (`alpha_T` where snapshots tell); `kappa` is None where it cannot be measured.
    """

    smoothness: float
    start_loss: float
    end_loss: float
    retained: float
    captured: float
    largest_deviation: float
    symmetry_error: float
    kappa: float | None
    squared_biases: tuple[float, ...]
    unit_variance: float


def bounds_of(m: Measured, view: RunView) -> tuple[dict[str, float], list[str]]:
    """Every bound that can be stated for the run's last phase, and remarks."""
    phase, eta = view.plan.phases[-1], view.learning_rate
    if phase.clip_norm is None or eta is None:
        return {}, [
            "No bounds: they are for SGD with clipping, and this run had another optimizer or no clip."
        ]
    if not 0 < m.smoothness < math.inf:
        return {}, ["No bounds: the loss shows no curvature here, or no finite one."]
    remarks = [RATE_REMARK]
    if eta * m.smoothness > 1:
        remarks.append(
            "Theorem 6.3 covers rates up to 1/smoothness; the run's is larger: its terms are of that."
        )
    if m.kappa is None:
        remarks.append(
            "RS's kappa cannot be measured here: no unit's gradient is within 3/4 of the clip norm of the mean. "
            "sqrt(k/d) stands for it, as in its App. G."
        )
    if phase.geometry != "identity":
        remarks.append("The bounds are for gradients as they are; this run standardized them.")
    return {
        **_rs(m, view, phase, eta),
        **_adadpigu(m, view, phase, eta),
        **_tp_topk(m, view, phase, eta),
    }, remarks


def _rs(m: Measured, view: RunView, phase: Phase, eta: float) -> dict[str, float]:
    """RS: Delta_C, Delta_sigma, r* and the bounds of its theorems at the run's rate of frozen coordinates."""
    plan, d, clip = view.plan, view.support.dimension, phase.clip_norm or 1.0
    rate, batch = 1 - view.support.active_ratio, plan.expected_batch_size(phase)
    share = m.kappa or math.sqrt(1 - rate)
    seen: Any = {
        "loss_gap": m.start_loss, "smoothness": m.smoothness, "dimension": d, "batch_size": batch,
        "steps": phase.steps,
    }  # fmt: skip
    run = Descent(
        **seen, learning_rate=eta, clip_norm=clip, noise_multiplier=phase.gradient_noise,
        symmetry_error=m.symmetry_error,
    )  # fmt: skip
    unclipped = noisy_bound(
        **seen, deviation_bound=m.largest_deviation, noise_std=phase.gradient_noise * clip, rate=rate
    )
    found = {
        "Delta_C (RS)": run.enlarged,
        "Delta_sigma (RS)": run.noise,
        "best share to freeze, r* (RS)": run.best_rate,
        "kappa (RS), measured or sqrt(k/d)": share,
        "bound of RS, Theorem 3.2 (noise, no clip)": unclipped,
        "bound of RS, Theorem 3.4 (clip, no noise)": run.clipped_bound(share),
        "bound of RS, Theorem 3.5": run.private_bound(rate, share),
        "bound of RS, eq. 15 (all coordinates)": run.private_bound(0.0, 1.0),
    }
    epsilon, delta, q = plan.target_epsilon, plan.delta, phase.sampling_rate
    if epsilon and delta:
        # The constant of Abadi et al. that gives the plan's own noise.
        constant = phase.noise_multiplier * epsilon / (q * math.sqrt(phase.steps * math.log(1 / delta)))
        found["bound of RS, Corollary C.1.1"] = budget_bound(
            run, rate, share, epsilon=epsilon, delta=delta, sampling_rate=q, constant=constant
        )
    return found


def _adadpigu(m: Measured, view: RunView, phase: Phase, eta: float) -> dict[str, float]:
    """AdaDPIGU: Theorems 13, 16 and 17."""
    clip, active, batch = phase.clip_norm or 1.0, view.support.size, view.plan.expected_batch_size(phase)
    rate: Any = {"smoothness": m.smoothness, "learning_rate": eta, "clip_norm": clip}
    found = {
        "bound of AdaDPIGU, Theorem 13": alignment_bound(loss_gap=m.start_loss, steps=phase.steps, **rate),
        "bound of AdaDPIGU, Theorem 17": private_alignment_bound(
            loss_decrease=(m.start_loss - m.end_loss) / phase.steps, noise_multiplier=phase.gradient_noise,
            active=active, batch_size=batch, **rate,
        ),
    }  # fmt: skip
    if m.retained > 0:
        found["bound of AdaDPIGU, Theorem 16"] = retention_bound(
            loss_gap=m.start_loss, smoothness=m.smoothness, steps=phase.steps, retained=m.retained,
            deviation_bound=m.largest_deviation, noise_std=phase.noise_multiplier * clip, active=active,
            batch_size=batch,
        )  # fmt: skip
    return found


def _tp_topk(m: Measured, view: RunView, phase: Phase, eta: float) -> dict[str, float]:
    """TP-TopK: the four terms of Theorem 6.3, their sum, and Corollary 6.6."""
    terms = projected_bound(
        loss_gap=m.start_loss,
        smoothness=m.smoothness,
        learning_rate=min(eta, 1 / m.smoothness),
        steps=phase.steps,
        squared_biases=m.squared_biases,
        batch_variance=m.unit_variance / view.plan.expected_batch_size(phase),
        mean_active=view.support.size,
        noise_std=noise_on_mean(view.plan, phase),
    )
    found = {
        "Theorem 6.3, progress": terms.progress,
        "Theorem 6.3, clipping bias": terms.clipping_bias,
        "Theorem 6.3, mini-batches": terms.mini_batch,
        "Theorem 6.3, DP noise": terms.dp_noise,
        "bound of Theorem 6.3 (gradient on the support)": terms.total,
    }
    if m.captured > 0:
        found["bound of Corollary 6.6 (whole gradient)"] = terms.full_gradient(m.captured)
    return found
