"""Your own loop around `Trainer`: another optimizer, a schedule, and a look at what is released.

Run: python examples/own_loop.py
"""

import torch
from torch import nn

from sparsedp import Trainer, held_out, plan
from sparsedp.batch import per_sample_loss
from sparsedp_experiments.data import digits


def main() -> None:
    data = digits()
    loss = nn.CrossEntropyLoss()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    planned = plan(
        "on-topk",
        units=len(data.train),
        batch_size=256,
        epochs=30,
        epsilon=8.0,
        delta=1e-5,
        max_grad_norm=1.0,
    )
    trainer = Trainer(
        model,
        data.train,
        loss,
        plan=planned,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        lr_scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        evaluate=held_out(data.test, per_sample_loss(loss)),
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
