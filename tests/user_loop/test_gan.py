"""Two packs that read each other: GANs, held to a plain loop; and the weights of all members in one dict."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import distance, numbers
from torch import Tensor, nn

import shoal


def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "gan.py"
    spec = importlib.util.spec_from_file_location("gan_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_is_a_plain_loop_for_each_gan() -> None:
    pytest.importorskip("sklearn")
    gan = example()
    count, steps = 3, 20
    images = numbers(1, 40, 64).sigmoid()
    torch.manual_seed(5)
    generators, discriminators = (
        [make().double() for _ in range(count)] for make in (gan.generator, gan.discriminator)
    )
    packs = gan.make_packs(generators, discriminators)
    torch.manual_seed(6)
    losses = gan.train(*packs, images, steps)
    assert all(tier == "stacked" for pack in packs for tier, _ in pack.tiers.values()), [p.tiers for p in packs]
    for place, (generator, discriminator) in enumerate(zip(generators, discriminators, strict=True)):
        adam = {"lr": gan.RATES[place], "betas": (0.5, 0.999)}
        first, second = (torch.optim.Adam(model.parameters(), **adam) for model in (generator, discriminator))
        torch.manual_seed(6)
        for _ in range(steps):
            rows = torch.randint(len(images), (gan.BATCH,))
            noise = torch.randn(2, gan.BATCH, gan.NOISE, dtype=torch.float64)
            second.zero_grad()
            real, fake = discriminator(images[rows]), discriminator(generator(noise[0]).detach())
            discriminator_loss = F.softplus(-real).mean() + F.softplus(fake).mean()
            discriminator_loss.backward()
            second.step()
            first.zero_grad()
            generator_loss = F.softplus(-discriminator(generator(noise[1]))).mean()
            generator_loss.backward()
            first.step()
        for loss, own in zip(losses, (generator_loss, discriminator_loss), strict=True):
            assert distance(loss[place], own) < 1e-9
        for pack, model in zip(packs, (generator, discriminator), strict=True):
            for a, b in zip(pack.member(place).parameters(), model.parameters(), strict=True):
                assert distance(a, b) < 1e-9


class Branch(nn.Linear):
    """Goes by the data, so it has no graph."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if float(out.detach().sum()) > 0 else 2 * out


@pytest.mark.parametrize("kind", [nn.Linear, Branch])
def test_the_state_of_all_members(kind: Any) -> None:
    models = [kind(3, 2) for _ in range(4)]
    pack = shoal.Pack(models, loss=F.mse_loss, hparams={"lr": 0.1})
    before = pack.stacked_state()
    assert torch.equal(before["weight"], torch.stack([model.weight for model in models]))
    pack.step(torch.randn(5, 3), torch.randn(5, 2))
    pack.remove(1)
    state = pack.stacked_state()
    assert list(state) == ["weight", "bias"] and state["weight"].shape == (3, 2, 3)
    for place, id in enumerate(pack.ids):
        assert torch.equal(state["bias"][place], pack.member(id).bias)
    state["bias"].zero_()
    assert pack.member(0).bias.abs().sum() > 0, "it is a copy"
    pack.add(nn.Linear(3, 4))
    with pytest.raises(ValueError, match="members' weights differ in name or shape"):
        pack.stacked_state()


def test_a_gradient_hook_goes_into_params() -> None:
    hooked = nn.Linear(3, 2)
    hooked.weight.register_hook(lambda grad: grad * 0)
    with pytest.raises(shoal.JobError, match=r"^member 0: model has a gradient hook on .*; set it in params="):
        shoal.Pack([hooked], loss=F.mse_loss)

    def params(model: nn.Module) -> Any:
        model.get_parameter("weight").register_hook(lambda grad: grad * 0)
        return model.parameters()

    pack = shoal.Pack([nn.Linear(3, 2)], loss=F.mse_loss, params=params, optimizer=torch.optim.SGD, hparams={"lr": 0.1})
    before = pack.member(0)
    pack.step(torch.randn(5, 3), torch.randn(5, 2))
    assert torch.equal(pack.member(0).weight, before.weight)
    assert not torch.equal(pack.member(0).bias, before.bias)
