"""Ray Tune with a pack of configurations in each of its trials: 24 configurations as 3 trials, on a local Ray.

Needs Ray: pip install 'shoal[ray]'
"""

import os
import sys

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # this Ray listens on loopback alone
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS", "0")

try:
    import ray
    from ray import tune
except ImportError:
    print("This example needs Ray: pip install 'shoal[ray]'")
    sys.exit(0)

import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.tune.bridges.ray_packs import best_first, pack_trainable, packs
from shoal.tune.space import parse

x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] * x[:, 1] > 0).long()


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def make_job(config: dict) -> shoal.Job:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(8, config["width"]), nn.Tanh(), nn.Linear(config["width"], 2))

    return shoal.Job(
        model=network,
        data=(x[:384], y[:384]),
        val=(x[384:], y[384:]),
        loss=F.cross_entropy,
        metrics={"accuracy": accuracy},
        hparams={"lr": config["lr"]},
        batch_size=32,
        epochs=10,
    )


if __name__ == "__main__":
    space = parse({"lr": ("log", 1e-4, 1e-1), "width": [16, 32]})
    configs = [space.sample(0, number) for number in range(24)]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    try:
        results = tune.Tuner(
            pack_trainable(make_job, "accuracy", device="cpu"),
            param_space={"pack": tune.grid_search(packs(configs, size=8))},
            run_config=tune.RunConfig(storage_path=os.path.abspath("ray_results"), verbose=0),
        ).fit()
    finally:
        ray.shutdown()
    best = best_first(results, "accuracy")
    print(f"{len(best)} configurations in {len(results)} trials of Ray Tune")
    for row in best[:3]:
        print(f"accuracy {row['value']:.3f} after {row['epochs']} epochs: {row['config']}")
