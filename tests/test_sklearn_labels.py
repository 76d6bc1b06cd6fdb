"""Labels outside the declared classes are refused without being told."""

import numpy as np
import pytest

from sparsedp.errors import DataError
from sparsedp.sklearn.inputs import encode_labels


@pytest.mark.parametrize(("labels", "private"), [([0, 1, 7741], "7741"), (["a", "b", "hiv+"], "hiv")])
def test_the_refusal_names_the_declared_classes_and_never_the_label(labels, private):
    declared = labels[:2]
    with pytest.raises(DataError, match="declared classes") as refusal:
        encode_labels(np.array(labels), declared)
    assert str(declared) in str(refusal.value)
    assert private not in str(refusal.value)
