"""An ordinary PyTorch loop made private by `make_private`: the lines that change are numbered.

Run: python examples/keep_your_loop.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

import sparsedp
from sparsedp_experiments.data import digits

EPOCHS = 10


def main() -> None:
    data = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loader = DataLoader(data.train, batch_size=128, shuffle=True)
    criterion = nn.CrossEntropyLoss()
    private = sparsedp.make_private(  # 1
        model, optimizer, loader, criterion, method="tp-topk", epsilon=3, epochs=EPOCHS
    )
    model, optimizer, loader, criterion = private  # 2
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        scheduler.step()
        accuracy = private.evaluate(data.test)[
            "accuracy"
        ]  # 3: the training loss is not private, this is for watching
        print(f"epoch {epoch + 1}  epsilon {private.epsilon():.2f}  held-out accuracy {accuracy:.3f}")
    result = private.result
    print(
        f"epsilon {result.epsilon:.2f} at delta {result.delta:g}, {result.k} of {result.d} coordinates active"
    )


if __name__ == "__main__":
    main()
