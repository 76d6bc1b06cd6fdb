"""Claims that nobody checks again, and rows of people left in what a run gives back."""

from mutants.mutant import Edit, Mutant, mutant

CLAIMS = "tests/runs/test_verification.py::"
KEPT = "tests/training/test_attributes.py::test_what_is_kept_of_the_rows_is_refused_by_name_before_a_release"

MUTANTS = [
    mutant(
        "edited-epsilon-verifies",
        "The epsilon in the record is believed, not counted again",
        "runs/verify.py",
        '    yield _epsilon("the record\'s epsilon", record["epsilon"], _epsilon_of(plan, ledger.planned), plan)\n',
        "",
        CLAIMS + "test_a_headline_epsilon_is_computed_again",
    ),
    mutant(
        "edited-files-verify",
        "Nothing binds the record, the metrics and the weights to the ledger",
        "runs/verify.py",
        "for name in (CHECKPOINT, METRICS, RECORD):",
        "for name in ():",
        CLAIMS + "test_weights_belong_to_the_chain_and_changed_ones_are_not_resumed",
    ),
    mutant(
        "running-switches-checks-off",
        "A record that says the run is still running is not compared with anything",
        "runs/verify.py",
        '        problem = f"it says running, and knows {known} already" if known else None\n',
        "        problem = None\n",
        CLAIMS + "test_calling_a_run_running_switches_nothing_off",
    ),
    mutant(
        "any-json-is-read",
        "A file may say one thing to a person and another to the reader: keys that stand twice",
        "runs/verify.py",
        "                fits = is_canonical(file.read_bytes())\n",
        "                fits = True\n",
        CLAIMS + "test_spaces_and_another_order_of_keys_are_refused",
    ),
    mutant(
        "last-input-stays-in-the-model",
        "A model may keep the rows it has seen, and is given back with them",
        "validation/state.py",
        "        if kept:\n",
        "        if False:\n",
        KEPT,
    ),
    mutant(
        "rows-in-containers-stay",
        "Rows kept inside a list or a dictionary are not found",
        "validation/state.py",
        "            for place, inner in enumerate(list(value)):\n",
        "            for place, inner in ():\n",
        KEPT,
    ),
    mutant(
        "loss-remembers",
        "A loss may remember records: one halves the scale of everybody's loss in all later steps",
        "validation/state.py",
        "            self._visit(LOSS, loss)\n",
        "            self._visit(LOSS, None)\n",
        "tests/training/test_loss_memory.py::test_a_loss_scale_that_one_record_halves_for_all_is_refused",
    ),
    Mutant(
        "half-precision-sums",
        "Gradients of a module without a formula are clipped and added up in half precision",
        (
            Edit(
                "grad_sample/layers/source.py",
                "    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor\n",
                "    return tensor\n",
            ),
            # Where a processor's half-precision matrix products are broken, PyTorch dies instead of leaking.
            Edit(
                "grad_sample/clipping.py",
                "torch.matmul(factors[span].to(z), z[:, span])",
                "(factors[span].to(z).unsqueeze(1) * z[:, span]).sum(1)",
            ),
        ),
        ("tests/grad_sample/test_thousands.py::test_a_module_without_a_fast_path_in_half_precision",),
    ),
    mutant(
        "long-sums-in-half-precision",
        "Sums over chunks go on in half precision, where the first records weigh less than the last",
        "grad_sample/clipping.py",
        "        add_to(sums[name].view(-1), value)\n",
        "        sums[name].copy_((sums[name] + value).to(torch.bfloat16))\n",
        "tests/grad_sample/test_thousands.py::test_a_module_without_a_fast_path_in_half_precision",
    ),
]
