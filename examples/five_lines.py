"""A private classifier in five lines: the digits that come with scikit-learn, no download.

Run: python examples/five_lines.py
"""

from torch import nn

import sparsedp
from sparsedp_experiments import data as datasets

digits = datasets.digits()
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
loss = nn.CrossEntropyLoss(reduction="none")
result = sparsedp.fit(model, digits.train, loss, method="tp-topk", epsilon=3, eval_dataset=digits.test)
print(f"accuracy {result.metrics['accuracy']:.3f} at epsilon {result.epsilon:.2f}, delta {result.delta:g}")
