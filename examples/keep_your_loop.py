"""An ordinary PyTorch loop made private by `make_private`: three lines are changed, and they are numbered.

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
    held_out = DataLoader(data.test, batch_size=512)
    loss_fn = nn.CrossEntropyLoss(reduction="none")  # 1
    model, optimizer, loader = sparsedp.make_private(  # 2
        model, optimizer, loader, loss_fn, method="tp-topk", epsilon=3, epochs=EPOCHS
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y).mean()  # 3
            loss.backward()
            optimizer.step()
        scheduler.step()
        with torch.no_grad():
            hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in held_out)
        print(f"epoch {epoch + 1}  held-out accuracy {hits / len(data.test):.3f}")
    result = loader.finish()
    print(
        f"epsilon {result.epsilon:.2f} at delta {result.delta:g}, {result.k} of {result.d} coordinates active"
    )


if __name__ == "__main__":
    main()
