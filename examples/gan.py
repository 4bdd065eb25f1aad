"""GANs in your own loop: 16 GANs with different learning rates, as a pack of generators and a pack of discriminators.

Each generator's step needs its discriminator's weights, and gradients through them, so they are part of its batch.

python examples/gan.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call

import shoal

RATES = [1e-4 * 1.4**place for place in range(16)]
NOISE, BATCH = 16, 64


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())


def discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


STRUCTURE = discriminator()  # only its structure; the weights come with the batch


def discriminator_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A discriminator learns to distinguish digits from what its generator makes."""
    real, fake = model(batch["real"]), model(batch["fake"])
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def generator_step(model: nn.Module, batch: dict[str, object]) -> Tensor:
    """A generator learns to make what its discriminator takes for a digit."""
    return F.softplus(-functional_call(STRUCTURE, batch["weights"], model(batch["noise"]))).mean()


def make_packs(generators: list[nn.Module], discriminators: list[nn.Module]) -> tuple[shoal.Pack, shoal.Pack]:
    adam = [{"lr": lr, "betas": (0.5, 0.999)} for lr in RATES[: len(generators)]]
    first = shoal.Pack(generators, optimizer=torch.optim.Adam, hparams=adam, step=generator_step)
    return first, shoal.Pack(discriminators, optimizer=torch.optim.Adam, hparams=adam, step=discriminator_step)


def train(generators: shoal.Pack, discriminators: shoal.Pack, images: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """All GANs see the same digits and the same noise; the last losses of each."""
    count = len(generators)
    for _ in range(steps):
        rows, noise = torch.randint(len(images), (BATCH,)), torch.randn(2, BATCH, NOISE, dtype=images.dtype)
        real = images[rows].expand(count, BATCH, -1)
        fake = generators.eval(noise[0])  # [M, BATCH, 64]: each discriminator has fakes of its own generator
        discriminator_loss = discriminators.step({"real": real, "fake": fake}, per_member=True)
        batch = {"noise": noise[1].expand(count, BATCH, -1), "weights": discriminators.stacked_state()}
        generator_loss = generators.step(batch, per_member=True)
    return generator_loss, discriminator_loss


def main(steps: int = 400) -> None:
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    torch.manual_seed(0)
    generators, discriminators = make_packs([generator() for _ in RATES], [discriminator() for _ in RATES])
    generator_loss, discriminator_loss = train(generators, discriminators, images, steps)
    print(generators, discriminators)
    spread = generators.eval(torch.randn(256, NOISE)).std(1).mean(1)  # near 0: it makes one image whatever the noise is
    print("lr       generator  discriminator  spread")
    for row in zip(RATES, generator_loss.tolist(), discriminator_loss.tolist(), spread.tolist(), strict=True):
        print("{:.1e}  {:9.3f}  {:13.3f}  {:6.3f}".format(*row))


if __name__ == "__main__":
    main()
