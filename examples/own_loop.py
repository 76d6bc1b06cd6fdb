"""Your own loop around `Trainer`: another optimizer, a schedule, and a look at what is released.

Run: python examples/own_loop.py
"""

import torch
from torch import nn

from sparsedp import Trainer, build_plan, datasets, held_out
from sparsedp.batch import supervised


def main() -> None:
    digits = datasets.digits()
    loss = nn.CrossEntropyLoss(reduction="none")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    plan = build_plan(
        "on-topk",
        units=len(digits.train),
        batch_size=256,
        epochs=30,
        epsilon=8.0,
        delta=1e-5,
        max_grad_norm=1.0,
    )
    trainer = Trainer(
        model,
        digits.train,
        loss,
        plan=plan,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        lr_scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        evaluate=held_out(digits.test, supervised(loss)),
    )
    for batch in trainer:
        done = trainer.step(batch)
        if done.step % 30 == 0:
            released = done.released
            signal = float(released.mean.square().sum() - released.noise_scale.square().sum())
            print(
                f"step {done.step:3d}  {released.support.size} coordinates  gradient energy about {signal:+.4f}"
            )
    result = trainer.finish()
    print(
        f"accuracy {result.metrics['accuracy']:.3f} at epsilon {result.epsilon:.2f}, delta {result.delta:g}"
    )


if __name__ == "__main__":
    main()
