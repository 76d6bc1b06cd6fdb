"""The benchmark of heads: every contender runs, and the bar is read as it should be."""

from benchmarks.heads import Task, measure, told


def test_all_three_train_the_same_rows():
    task = Task(200, 50, 1)
    least = measure(task, turns=1)
    assert set(least) == {"calibration", "sparsedp", "PyTorch", "scikit-learn"}
    assert all(seconds > 0 for name, seconds in least.items() if name != "calibration")
    assert task.data()[0].shape == (200, 1280)


def test_the_bar_is_met_up_to_a_tenth_more():
    least = {"calibration": 9.0, "sparsedp": 1.1, "PyTorch": 1.0, "scikit-learn": 0.5}
    *_, pytorch, scikit_learn = told(Task(200, 50, 1), least)
    assert pytorch == "sparsedp / PyTorch: 1.10 (met, at most 1.1)"
    assert "2.20 (missed" in scikit_learn
