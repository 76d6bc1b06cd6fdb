"""One unit moves the sum by more than is stated: the clip, the norms, the units."""

from mutants.mutant import Edit, Mutant, mutant

GEOMETRY = "tests/core/test_geometry_and_clip.py::"
EDGES = "tests/grad_sample/test_edge_cases.py::"
UNITS = "tests/grad_sample/test_units_and_top.py::"
LOOP = "tests/grad_sample/test_layers.py::test_the_engine_equals_a_plain_loop"
GRAMS = "tests/grad_sample/test_grams.py::"
NOT_FINITE = EDGES + "test_a_sample_that_is_not_finite_contributes_exactly_zero"

MUTANTS = [
    mutant(
        "clip-one-percent-loose",
        "The clip lets contributions be one percent longer than stated",
        "core/clip.py",
        "bound = self.norm / (1 + ROUNDING_MARGIN)",
        "bound = self.norm * 1.01",
        GEOMETRY + "test_a_clipped_contribution_never_exceeds_the_sensitivity",
    ),
    mutant(
        "no-rounding-margin",
        "The clip leaves no room for rounding",
        "core/clip.py",
        "bound = self.norm / (1 + ROUNDING_MARGIN)",
        "bound = self.norm * (1 + 1e-7)",
        GEOMETRY + "test_a_clipped_contribution_never_exceeds_the_sensitivity",
    ),
    mutant(
        "sensitivity-halved",
        "The sensitivity that scales the noise is half the clip norm",
        "core/clip.py",
        "        return self.norm\n",
        "        return self.norm / 2\n",
        GEOMETRY + "test_a_clipped_contribution_never_exceeds_the_sensitivity",
    ),
    mutant(
        "clip-larger-norms-only",
        "Contributions up to twice the clip norm pass as they are",
        "core/clip.py",
        "factors = torch.clamp(bound / norms, max=1.0)",
        "factors = torch.where(norms > 2 * bound, bound / norms, torch.ones_like(norms))",
        GEOMETRY + "test_a_contribution_above_the_bound_is_scaled_down_to_it_but_for_the_margin",
    ),
    mutant(
        "non-finite-passes",
        "A contribution that is not finite is not dropped",
        "core/clip.py",
        "return torch.where(norms.isfinite(), factors, torch.zeros_like(norms))",
        "return torch.where(norms.isnan(), torch.ones_like(norms), factors)",
        GEOMETRY + "test_a_contribution_that_is_not_finite_counts_as_absent",
    ),
    mutant(
        "non-finite-row-in-the-sum",
        "A row that is not finite gets factor zero and is added all the same: zero times infinity",
        "grad_sample/query.py",
        "    z = torch.where((factors > 0).unsqueeze(1), z, torch.zeros_like(z))\n",
        "",
        NOT_FINITE + "[reference-linear-identity-nan]",
    ),
    mutant(
        "non-finite-row-in-the-fast-sum",
        "The same in the fast engine",
        "grad_sample/clipping.py",
        "        if bool(quiet.any()):\n            z[:, quiet] = 0\n",
        "",
        NOT_FINITE + "[bookkeeping-linear-identity-nan]",
    ),
    mutant(
        "cancelling-terms-in-a-shared-sum",
        "The large terms of a record whose positions cancel pass through the sum that others share",
        "grad_sample/layers/grams.py",
        "    alone = (largest.square() > MOST_TERMS**2 * squared).nonzero().squeeze(1).tolist()\n",
        "    alone: list[int] = []\n",
        GRAMS + "test_a_cancelling_record_cannot_disturb_the_sum_of_the_others[10000000.0]",
    ),
    mutant(
        "not-finite-row-in-a-shared-sum",
        "A row too extreme to be measured by Gram matrices counts as measured",
        "grad_sample/layers/grams.py",
        "        squared.masked_fill_(torch.cat(extremes), torch.inf)\n",
        "        pass\n",
        GRAMS + "test_a_record_that_cannot_be_measured_counts_as_absent[1e+20-sequence]",
    ),
    mutant(
        "rows-clipped-not-units",
        "Each row of a unit is clipped by itself, so a unit counts several times",
        "grad_sample/reference.py",
        "sum_clipped_rows(mean_by_unit(gradients, units), query)",
        "sum_clipped_rows(gradients, query)",
        UNITS + "test_a_units_mean_gradient_is_clipped_once[reference-linear-identity]",
    ),
    mutant(
        "rows-clipped-not-units-fast",
        "The same in the fast engine",
        "grad_sample/bookkeeping.py",
        "return Chunk(chunk.row_count, chunk.units, sources)",
        "return Chunk(chunk.row_count, None, sources)",
        UNITS + "test_a_units_mean_gradient_is_clipped_once[bookkeeping-linear-identity]",
    ),
    mutant(
        "unit-sums-not-means",
        "A unit's rows are added up before the clip, not averaged, in the fast engine alone",
        "grad_sample/bookkeeping.py",
        "return None if units is None else (1.0 / torch.bincount(units).to(torch.float64))[units]",
        "return None if units is None else torch.ones(len(units), dtype=torch.float64)",
        UNITS + "test_a_units_mean_gradient_is_clipped_once[bookkeeping-linear-identity]",
    ),
    mutant(
        "norm-of-half-the-coordinates",
        "The norm that decides the clip leaves out half of the active coordinates",
        "grad_sample/query.py",
        "query.clip.factors(torch.linalg.vector_norm(z, dim=1))",
        "query.clip.factors(torch.linalg.vector_norm(z[:, : (z.shape[1] + 1) // 2], dim=1))",
        LOOP + "[reference-linear-identity-float32]",
    ),
    mutant(
        "norm-of-a-layer-too-small",
        "The fast engine halves the norm of linear layers",
        "grad_sample/clipping.py",
        "closed.squared_norms(self._metrics.of(name)).double()",
        "closed.squared_norms(self._metrics.of(name)).double() / 4",
        LOOP + "[bookkeeping-linear-identity-float32]",
    ),
    mutant(
        "norm-misses-a-parameter",
        "The fast engine leaves the last parameter out of the norm, but not out of the sum",
        "grad_sample/clipping.py",
        "squared + squared_norms_of(kept[name]).sum(0)\n",
        "squared + squared_norms_of(kept[name]).sum(0) * (name != list(self._blocks)[-1])\n",
        LOOP + "[bookkeeping-linear-identity-float32]",
    ),
    mutant(
        "standardized-after-the-clip",
        "The geometry is applied after the clip, so its scale undoes the bound",
        "grad_sample/query.py",
        "    return factors @ z\n",
        "    factors = query.clip.factors(torch.linalg.vector_norm(gradients.double(), dim=1))\n"
        "    return factors @ z\n",
        LOOP + "[reference-linear-standardized-float32]",
    ),
    mutant(
        "top-r-after-the-clip",
        "The per-sample top-r comes after the norm was taken",
        "grad_sample/query.py",
        "    z = keep_largest(z, query.kept_per_unit)\n"
        "    factors = query.clip.factors(torch.linalg.vector_norm(z, dim=1))\n",
        "    factors = query.clip.factors(torch.linalg.vector_norm(z, dim=1))\n"
        "    z = keep_largest(z, query.kept_per_unit)\n",
        UNITS + "test_the_largest_magnitudes_of_each_sample_are_kept[bookkeeping-linear-0.01-identity]",
    ),
    mutant(
        "top-r-of-the-batch",
        "The top-r is chosen by the mean over the batch: every row's choice depends on the others",
        "grad_sample/query.py",
        "    magnitude = rows.abs()\n",
        "    magnitude = rows.abs().mean(0, keepdim=True).expand_as(rows)\n",
        UNITS + "test_the_largest_magnitudes_of_each_sample_are_kept[bookkeeping-linear-0.01-identity]",
    ),
    mutant(
        "support-moves-between-micro-batches",
        "The second micro-batch of a step is restricted to other coordinates",
        "grad_sample/reference.py",
        "            units = None if batch.units is None else batch.units.to(device)\n",
        "            units = None if batch.units is None else batch.units.to(device)\n"
        "            gradients = gradients.roll(int(bool(total.any())), 1)\n",
        EDGES + "test_any_split_into_micro_batches_gives_the_same_sum",
    ),
    mutant(
        "patients-counted-by-rows",
        "Private normalisation clips rows instead of patients",
        "privacy/queries.py",
        "ClippedRows(mean_by_unit(values, batch.units), self.clip)",
        "ClippedRows(values, self.clip)",
        "tests/privacy/test_normalisation.py::test_one_more_patient_moves_the_sum_by_at_most_the_clip",
    ),
    Mutant(
        "unclipped-statistics",
        "Private normalisation does not clip",
        (
            Edit(
                "privacy/queries.py",
                "factors = self.clip.tightened(bound).factors(torch.linalg.vector_norm(rows, dim=1))",
                "factors = torch.ones(len(rows), dtype=rows.dtype)",
            ),
        ),
        ("tests/privacy/test_normalisation.py::test_one_more_patient_moves_the_sum_by_at_most_the_clip",),
    ),
    mutant(
        "no-room-for-the-grid",
        "The clip leaves no room for rounding to the grid",
        "privacy/mechanism.py",
        "return cls(step, bits, sensitivity * (1 - 2.0**-MARGIN_BITS))",
        "return cls(step, bits, sensitivity)",
        "tests/privacy/test_grid.py::test_the_worst_roundings_stay_within_what_the_accountant_is_told",
    ),
    mutant(
        "cut-by-place",
        "Micro-batches are cut by place: one unit more or less moves all after it, and rounds them anew",
        "sampling.py",
        "    middle = start + int(np.searchsorted(units[start:stop], last >> digit << digit))\n",
        "    middle = (start + stop) // 2\n",
        "tests/sampling/test_cutting.py::test_a_full_run_is_halved_by_numbers_not_by_places",
    ),
    mutant(
        "noise-of-half-the-steps",
        "The noise on the grid is half of what was planned",
        "privacy/mechanism.py",
        "randomness.add_rounded_gaussian(grid.noise_bits, steps",
        "randomness.add_rounded_gaussian(grid.noise_bits - 1, steps",
        "tests/privacy/test_noise.py::test_noise_for_feature_statistics_is_scaled_by_their_clip",
    ),
    mutant(
        "noise-left-as-it-was-refused",
        "The sampler keeps what its rejection step refuses",
        "core/gaussian_two_words.py",
        "    return where[~kept(cells, places, lots, words)]\n",
        "    return where[:0]\n",
        "tests/core/test_rounded_gaussian.py::test_it_is_the_slow_sampler_to_the_last_bit",
    ),
    mutant(
        "noise-of-one-word-left-as-it-was-refused",
        "The sampler of one word a draw keeps what its rejection step refuses",
        "core/gaussian_one_word.py",
        "    refused = ~kept(cells, places, lots, words)\n",
        "    refused = np.zeros(len(cells), dtype=bool)\n",
        "tests/core/test_rounded_gaussian.py::test_from_one_word_it_is_the_slow_sampler_too",
    ),
]
