"""Data that gets past the mechanism: into scores, statistics, divisors, files, the choice of what is evaluated."""

from mutants.mutant import Edit, Mutant, mutant

BITS = "tests/training/test_noninterference.py::test_two_data_sets_leave_the_same_bits"
KEEP_RAW = Edit(
    "grad_sample/clipping.py",
    "        return self._total\n",
    "        torch._raw = self._total.clone()\n        return self._total\n",
)
"""The clipped sum before any noise, where the leaks below find it."""
KEEP_SIZE = Edit(
    "sampling.py",
    "        if self._index is None:\n            return [_Chunk(chosen[run]",
    "        torch._size = len(chosen)\n        if self._index is None:\n            return [_Chunk(chosen[run]",
)
"""The realised batch size, as well."""

MUTANTS = [
    Mutant(
        "scores-from-raw-gradients",
        "Coordinates are ranked by the sum before noise",
        (
            KEEP_RAW,
            Edit(
                "methods/observation.py",
                'released.mean.to("cpu", torch.float64), released.noise_variance',
                'torch._raw.to("cpu", torch.float64), released.noise_variance',
            ),
        ),
        (f"{BITS}[tp-topk]",),
    ),
    Mutant(
        "statistics-from-raw-gradients",
        "AdaDPIGU's statistics move with the sum before noise",
        (
            KEEP_RAW,
            Edit(
                "methods/standardization.py",
                'gradient, alpha = released.mean.to("cpu", torch.float64), self.alpha',
                'gradient, alpha = torch._raw.to("cpu", torch.float64), self.alpha',
            ),
        ),
        (f"{BITS}[adadpigu]",),
    ),
    Mutant(
        "realised-batch-size",
        "The sum is divided by the number of rows that were drawn",
        (
            Edit(
                "training/step.py",
                "self.company.engine_for(step),\n                batch,\n",
                "self.company.engine_for(step),\n                (batch := list(batch)),\n",
            ),
            Edit(
                "training/step.py",
                "expected_batch_size=self.plan.expected_batch_size(phase)",
                "expected_batch_size=max(1, sum(part.row_count for part in batch))",
            ),
        ),
        (
            "tests/training/test_trainer.py::"
            "test_a_sampled_batch_is_divided_by_the_expected_size_never_by_its_own",
        ),
    ),
    Mutant(
        "gradients-in-the-checkpoint",
        "The checkpoint keeps the last sum before noise",
        (
            KEEP_RAW,
            Edit(
                "runs/state.py",
                '        "support": history.support.indices,\n    }\n',
                '        "support": history.support.indices,\n'
                '        "last": getattr(__import__("torch"), "_raw", history.support.indices),\n    }\n',
            ),
        ),
        (f"{BITS}[dp-sgd]",),
    ),
    Mutant(
        "batch-size-in-the-metrics",
        "An epoch's line tells how many rows its last batch had",
        (
            KEEP_SIZE,
            Edit(
                "training/recorder.py",
                "            metrics=self._metrics(),\n",
                '            metrics={**self._metrics(), "rows": float(__import__("torch")._size)},\n',
            ),
        ),
        (f"{BITS}[dp-sgd]",),
    ),
    Mutant(
        "batch-size-in-the-timing",
        "The seconds a run took hide a batch size in their last digits",
        (
            KEEP_SIZE,
            Edit(
                "runs/record.py",
                '"timing": {"seconds": round(seconds, 3)}',
                '"timing": {"seconds": round(seconds, 3) + 1e-6 * getattr(__import__("torch"), "_size", 0)}',
            ),
        ),
        (f"{BITS}[dp-sgd]",),
    ),
    mutant(
        "anybody-may-release",
        "A released value can be made without the mechanism",
        "privacy/mechanism.py",
        "        if seal is not _SEAL:\n",
        "        if seal is None:\n",
        "tests/privacy/test_released.py::test_it_cannot_be_built_without_the_seal",
    ),
    mutant(
        "methods-see-the-engine",
        "A file of the methods imports the gradient engine",
        "methods/scores.py",
        "import torch\nfrom torch import Tensor\n",
        "import torch\nfrom torch import Tensor\n\nfrom sparsedp.grad_sample import make_engine\n",
        "tests/test_boundary.py::test_the_package_does_not_import_the_gradient_engine[methods]",
    ),
    mutant(
        "noise-drawn-elsewhere",
        "A file that is not listed draws normal numbers",
        "methods/standardization.py",
        "        gradient, alpha = released.mean.to",
        "        torch.randn(1)\n        gradient, alpha = released.mean.to",
        "tests/test_boundary.py::test_only_the_listed_files_use_it[draws]",
    ),
    mutant(
        "training-rows-evaluated",
        "Rows of the training data are evaluated exactly, and the result is written down",
        "training/fit.py",
        "    refuse_training_rows(train.dataset, apart)\n",
        "",
        "tests/training/test_overlap.py::test_fit_refuses_a_part_of_its_training_data",
    ),
    mutant(
        "converted-training-rows-evaluated",
        "Arrays of the training data are evaluated exactly, because a conversion copied them",
        "training/fit.py",
        "        refuse_training_arrays(train.arrays, apart.arrays)\n",
        "        pass\n",
        "tests/training/test_overlap.py::test_rows_that_fit_converts_are_compared_as_they_were_given",
    ),
    mutant(
        "buffers-may-watch",
        "A buffer that remembers private rows is not noticed",
        "validation/state.py",
        "        if changed:\n",
        "        if False:\n",
        "tests/training/test_guard.py::test_a_write_is_refused_in_the_step_it_happens",
    ),
]
