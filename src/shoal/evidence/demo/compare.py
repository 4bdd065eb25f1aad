"""Compare training alone and packed: the numbers of the demonstration and its picture. Needs neither torch nor a
GPU."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.evidence.bench.report import new_figure

EQUAL = 1e-9
"""The largest relative difference of a weight, in float64, that counts as rounding."""


@dataclass(kw_only=True, slots=True)
class Comparison:
    """The result of the demonstration; every number is measured unless its name says estimated."""

    networks: int
    alone_trained: int
    """How many networks were trained alone before time ran out."""
    alone_seconds: float
    """Seconds for `alone_trained` networks."""
    alone_seconds_estimated: float | None
    """Seconds for all networks, estimated in proportion; None if all were trained."""
    packed_seconds: float
    gain: float
    """The time alone, measured or estimated, divided by the time packed."""
    alone_peak_bytes: int | None
    packed_peak_bytes: int | None
    import_bytes: int | None
    """The part of both peaks that PyTorch, Shoal and the data take before any training."""
    best_name: str
    best_accuracy: float
    tiers: list[str]
    largest_difference: float
    """The largest difference of a weight between the two ways in float32, relative to the largest weight of its
    tensor. It is for information only, since another order of summation can flip a ReLU."""
    float64_difference: float
    """The same in float64, where both ways must agree."""
    float64_networks: int
    """How many networks were compared in float64 before time ran out."""
    float64_steps: int
    """How many steps each of them was trained for."""
    same_accuracy: int
    """How many of the networks trained alone reach exactly the accuracy that they reach packed."""
    picture: str | None = None

    @property
    def alone_total(self) -> float:
        return self.alone_seconds if self.alone_seconds_estimated is None else self.alone_seconds_estimated

    @property
    def equal(self) -> bool:
        """Whether packed networks are those trained alone, up to float64's rounding."""
        return self.float64_difference <= EQUAL

    @property
    def speedup_text(self) -> str:
        """The gain in words, even if there is none."""
        return f"{self.gain:.1f} times faster" if self.gain >= 1 else f"{1 / self.gain:.1f} times slower"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def largest_difference(alone: Mapping[str, np.ndarray[Any, Any]], packed: Mapping[str, np.ndarray[Any, Any]]) -> float:
    """Return the largest |packed - alone| over all weights trained alone, relative to the tensor's largest weight."""
    assert alone, "nothing was trained alone"
    worst = 0.0
    for key in alone:
        a, b = packed[key].astype(np.float64), alone[key].astype(np.float64)
        worst = max(worst, float(np.abs(a - b).max() / np.abs(b).max()))
    return worst


def compare(alone: dict[str, Any], packed: dict[str, Any], checked: dict[str, Any], names: list[str]) -> Comparison:
    """Combine the results of both workers with the check in float64."""
    networks, trained = len(names), int(alone["trained"])
    seconds = float(alone["seconds"])
    estimated = None if trained == networks else seconds * networks / trained
    final = [history[-1] for history in packed["histories"]]
    difference = largest_difference(alone["weights"], packed["weights"])
    best = max(range(networks), key=lambda i: (final[i]["accuracy"], -final[i]["val_loss"]))
    same = sum(final[i]["accuracy"] == history[-1]["accuracy"] for i, history in enumerate(alone["histories"]))
    return Comparison(
        networks=networks,
        alone_trained=trained,
        alone_seconds=seconds,
        alone_seconds_estimated=estimated,
        packed_seconds=packed["seconds"],
        gain=(seconds if estimated is None else estimated) / packed["seconds"],
        alone_peak_bytes=alone["peak"],
        packed_peak_bytes=packed["peak"],
        import_bytes=packed["before"],
        best_name=names[best],
        best_accuracy=final[best]["accuracy"],
        tiers=packed["tiers"],
        largest_difference=difference,
        float64_difference=checked["difference"],
        float64_networks=checked["trained"],
        float64_steps=checked["steps"],
        same_accuracy=same,
    )


def draw(path: Path, comparison: Comparison, histories: list[list[dict[str, float]]], rates: list[float]) -> None:
    """Draw the learning curves of all networks, with a colour for each learning rate, beside the two times."""
    from matplotlib import colormaps

    figure = new_figure(11)
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 1))
    colours = {rate: colormaps["viridis"](0.9 * i / 3) for i, rate in enumerate(sorted(set(rates)))}
    for history, rate in zip(histories, rates, strict=True):
        epochs = range(1, len(history) + 1)
        curves.plot(epochs, [row["accuracy"] for row in history], color=colours[rate], alpha=0.45, linewidth=1)
    for rate, colour in colours.items():
        curves.plot([], [], color=colour, label=f"learning rate {rate:g}")
    curves.axhline(comparison.best_accuracy, color="grey", linewidth=0.8, linestyle="--")
    curves.set(
        xlabel="epoch",
        ylabel="validation accuracy",
        title=f"{comparison.networks} networks; best: {comparison.best_name}",
    )
    curves.legend(loc="lower right")
    alone = "alone" if comparison.alone_seconds_estimated is None else "alone\n(estimated)"
    drawn = bars.bar(
        [alone, "packed"], [comparison.alone_total, comparison.packed_seconds], color=["#b0b0b0", "#2a788e"]
    )
    bars.bar_label(drawn, fmt="%.1f s")
    bars.set(ylabel="seconds for all networks", title=comparison.speedup_text)
    figure.savefig(path, dpi=120)
