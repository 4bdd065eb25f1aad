"""Your own loop: shoal.Pack steps all members at once and leaves the loop to you. You can add and remove members.

python examples/own_loop.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import shoal


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


if __name__ == "__main__":
    torch.manual_seed(0)
    teacher = network()
    models = [network() for _ in range(4)]
    rates = [0.01, 0.03, 0.1, 0.3]
    pack = shoal.Pack(models, optimizer=torch.optim.SGD, hparams=[{"lr": lr} for lr in rates], loss=F.mse_loss)

    for step in range(200):
        x = torch.randn(64, 8)
        with torch.no_grad():
            y = teacher(x)
        losses = pack.step(x, y)  # one batch for all members -> one loss each, [M]
        if step % 50 == 0:
            print(f"step {step:3d}  " + "  ".join(f"{loss:.4f}" for loss in losses.tolist()))

    new_member = pack.add(network(), hparams={"lr": 0.05})
    for _ in range(50):
        x = torch.randn(64, 8)
        with torch.no_grad():
            y = teacher(x)
        losses = pack.step(x, y)
    print("with a new member" + "  ".join(f"{loss:.4f}" for loss in losses.tolist()))

    trained = pack.member(new_member)  # your own class again, a plain nn.Module
    print("the new member, used alone:", F.mse_loss(trained(x), y).item())
