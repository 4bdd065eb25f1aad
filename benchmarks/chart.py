"""Draws the README's chart from the results in this folder: `python benchmarks/chart.py` writes docs/gain.svg."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
NETWORKS = {"mlp": "32 MLPs\nbatch 64", "cnn": "32 small CNNs\nbatch 64", "gpt": "32 GPTs\n16 x 128 tokens",
            "resnet": "32 ResNet-18\nbatch 128"}  # fmt: skip
WAYS = {
    "eager": ("a loop, eager", "#b8c4ce"),
    "captured": ("a loop, each step compiled and captured in a CUDA graph", "#5b7c99"),
    "shoal": ("Shoal", "#e07a3f"),
}


def main() -> None:
    times = json.loads((HERE / "results" / "h200.json").read_text())["today"]
    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 9, "svg.hashsalt": "shoal"})
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for place, (way, (title, color)) in enumerate(WAYS.items()):
        heights = [times[network][way] for network in NETWORKS]
        bars = axes.bar([x + 0.27 * place for x in range(len(NETWORKS))], heights, 0.25, label=title, color=color)
        axes.bar_label(bars, [f"{height:.3g}" for height in heights], padding=2, fontsize=8)
    axes.set_yscale("log")
    axes.set_ylim(0.08, 5000)
    axes.set_xticks([x + 0.27 for x in range(len(NETWORKS))], list(NETWORKS.values()))
    axes.set_ylabel("ms for one step of all networks\n(logarithmic)")
    axes.set_title("One H200, bf16: less is better", fontsize=10, loc="left")
    axes.legend(frameon=False, loc="upper left", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE.parent / "docs" / "gain.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
