"""`shoal.split.sil`, which cuts a network into parts that are trained separately, by synthetic labels or by local
heads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.pool import batch_rows
from shoal.engine.members.step import evaluating
from shoal.jobs.job import Job
from shoal.results import Result
from shoal.split.api import takes_settings_of, train_by
from shoal.split.core.memory import WHOLE, Cost, part_costs
from shoal.split.core.parts import Part
from shoal.split.core.report import SplitReport
from shoal.split.core.state import named_state
from shoal.split.methods.heads import WithHead
from shoal.split.methods.labels import nearest
from shoal.split.methods.sil_method import SILMethod
from shoal.utils.tables import size

WEAK, NOTHING, LOSES = 0.9, 0.005, 0.02
"""Accuracies: below the first a part alone is weak, the second is the least a later part adds, joining may lose the
third."""


@dataclass(kw_only=True, slots=True)
class SilReport(SplitReport):
    """The results of each part of a cut network, besides the costs of the split."""

    cut_at: list[str] = field(default_factory=list)
    """The modules where the network was cut, as in `cuts`."""
    chosen: str = ""
    """Why the network was cut there, if the planner chose."""
    joined: dict[str, float] = field(default_factory=dict)
    """The joined network's loss, and its accuracy if there are classes, on the validation rows or else on the job's."""
    own: list[dict[str, float]] = field(default_factory=list)
    """The same for each part but the last alone, by the nearest label or by its head. With labels also `spread`: the
    distance of its outputs from their class's label, in distances between labels; 0 means that each class is one
    point."""
    costs: dict[str, dict[str, int]] = field(default_factory=dict)
    """Costs of one training step (peak_bytes, operations, weight_bytes) by part: "whole", "0", "1", ..."""
    cut_bytes_predicted: int = 0
    """The bytes that cross the cuts: labels once (A), or activations in every epoch (B, heads)."""
    cut_bytes_measured: int = 0
    advice: str = ""

    def __str__(self) -> str:
        why = f" ({self.chosen})" if self.chosen else ""
        plain = [line for line in SplitReport.__str__(self).splitlines() if not line.startswith("memory ")]
        lines = [*plain, f"cuts     {', '.join(self.cut_at)}{why}"]
        for name, cost in self.costs.items():
            whole = self.costs[WHOLE]
            memory, work = (cost[key] / max(1, whole[key]) for key in ("peak_bytes", "operations"))
            share = "" if name == WHOLE else f", {memory:.0%} of the whole's memory, {work:.0%} of its operations"
            lines.append(f"{'whole' if name == WHOLE else 'part ' + name:9}{size(cost['peak_bytes'])} at most{share}")
        parts = [f"part {index} alone {_value(values)}" for index, values in enumerate(self.own)]
        lines.append(f"reached  joined {_value(self.joined)}" + "".join(f", {line}" for line in parts))
        lines.append(f"crossed  {size(self.cut_bytes_measured)} (predicted {size(self.cut_bytes_predicted)})")
        return "\n".join([*lines, *([self.advice] if self.advice else [])])


@takes_settings_of(SILMethod)
def sil(job: Job, *args: Any, **options: Any) -> Result:
    """Cut a network, train its parts separately, and join them again.

    Args:
        job: The job to train. Every part has its optimizer, batches and length.

    Keyword Args:
        cuts: Modules before which to cut ("fc3"), or after which ("after:fc2"); or a number of parts, or None for two,
            cut where parts are most similar in memory and operations.
        method: With "heads", parts before a cut learn by a small head of their own, which works for any loss. With
            "labels", they learn to output random vectors, one for each class.
        variant: For labels. With "A" (None), parts after a cut learn from the vectors and need no inputs; with "B",
            from activations.
        distribution: Of the vectors' elements: "normal", "uniform" or "sign".
        scale: The standard deviation of the vectors' elements.
        vectors: The number of vectors for each class; a row learns the nearest one.
        noise: Noise added to the vectors that parts read (A), in units of `scale`.
        layout: "full" has a number for each element that crosses, "channel" one for each channel.
        head_width: The width of a head's hidden layer; None means that it has none.
        recovery: Epochs of ordinary training of the joined network at the end.
        local_steps: Steps in a round; None means an epoch.
        per_part: Part -> its own optimizer, hparams, clip_norm or schedule.
        moments: Whether optimizer state is kept between rounds ("travel") or not ("fresh").

    `device`, `tier`, `out`, `progress`, `val_every` and `checkpoint_every` are those of `shoal.split.ist`.

    Returns:
        The result with the whole network, of the user's own class; `result.split` is a SilReport.
    """
    result, method = train_by(SILMethod, job, args, options)
    result.split = report(result, method)
    return result


def report(result: Result, way: SILMethod) -> SilReport:
    """Return the trainer's report with everything that a cut network adds to it."""
    plain = result.split
    assert isinstance(plain, SplitReport)
    joined, alone = evaluate_parts(way, result.model)
    full = SilReport(
        **{f.name: getattr(plain, f.name) for f in fields(SplitReport)},
        cut_at=[cut.name for cut in way.pieces.cuts],
        chosen=_chosen(way.shares),
        joined=joined,
        own=alone,
        costs={name: cost.to_dict() for name, cost in costs(way).items()},
        cut_bytes_predicted=way.crossing_bytes(),
        cut_bytes_measured=way.crossed if way.lag else way.crossing_bytes(),
    )
    full.method = str(way.settings["method"])
    full.peak_predicted = {name: cost["peak_bytes"] for name, cost in full.costs.items()}
    full.advice = advice(way, joined, alone)
    return full


def _chosen(shares: list[float] | None) -> str:
    if shares is None:
        return ""
    text = ", ".join(f"{share:.0%}" for share in shares)
    return f"chosen: parts hold or do at most {text} of the whole"


def evaluate_parts(way: SILMethod, model: nn.Module) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Evaluate a trained network, and each of its parts but the last alone."""
    state = named_state(model)
    parts = [way.network(Part(number=index, role=str(index))) for index in range(way.count)]
    with torch.no_grad():
        for index, part in enumerate(parts):
            body = named_state(part)
            for name, piece in way.slices(Part(number=index, role=str(index))).items():
                if piece.name in state:
                    body[name].copy_(state[piece.name])
    sums: list[Counter[str]] = [Counter() for _ in parts]
    for batch in (way.member.val or way.data).feed(max(way.source.batch_size, 256)):
        value: Any = batch[:-1]
        for index, part in enumerate(parts):
            with evaluating(part):
                value = _through(way, index, part, value, batch, sums[index])
    *alone, joined = [
        {name: value / total["rows"] for name, value in total.items() if name != "rows"} for total in sums
    ]
    return joined, alone


def _through(
    way: SILMethod, index: int, part: nn.Module, inputs: Any, batch: Any, total: Counter[str]
) -> tuple[Tensor]:
    """Run one part on one batch, add its loss and accuracy to `total`, and return its output as the next part's
    input."""
    rows, target = batch_rows(batch), batch[-1]
    last, loss = index == way.count - 1, way.source.loss
    output: Tensor = (part.body if isinstance(part, WithHead) else part)(*inputs)
    total["rows"] += rows
    if last or isinstance(part, WithHead):
        outputs = part.head(output) if isinstance(part, WithHead) else output
        assert loss is not None
        total["loss"] += float(loss(outputs, target)) * rows  # type: ignore[assignment]
        if _has_classes(outputs, target):
            total["accuracy"] += float((outputs.argmax(1) == target).sum())  # type: ignore[assignment]
    else:
        table = way.tables[index]
        assert way.labels is not None
        total["loss"] += float(way.labels.loss(output, table, target)) * rows  # type: ignore[assignment]
        total["accuracy"] += float((nearest(output, table) == target).sum())  # type: ignore[assignment]
        total["spread"] += float(_spread(output, table, target).sum())  # type: ignore[assignment]
    return (output,)


def _has_classes(output: Tensor, target: Any) -> bool:
    """Return whether the targets are classes and the outputs their scores."""
    are_classes = isinstance(target, Tensor) and not target.is_floating_point() and target.dim() == 1
    return are_classes and output.dim() == 2 and output.shape[1] > 1


def _spread(outputs: Tensor, table: Tensor, target: Tensor) -> Tensor:
    """Return the distance of each row from the nearest label of its class, in mean distances between labels of
    classes."""
    flat, vectors = outputs.flatten(1).float(), table.flatten(2).float()
    distances = torch.cdist(vectors[:, 0], vectors[:, 0])
    mean_distance = distances.sum() / max(1, len(distances) * (len(distances) - 1))
    distance: Tensor = torch.linalg.vector_norm(flat.unsqueeze(1) - vectors[target], dim=2).min(1).values
    return distance / mean_distance


def costs(way: SILMethod) -> dict[str, Cost]:
    """Return the costs of a step of the whole network and of each part, on a batch of the job's size."""
    return part_costs(way, [Part(number=index, role=str(index)) for index in range(way.count)])


def advice(way: SILMethod, joined: dict[str, float], alone: list[dict[str, float]]) -> str:
    """Return advice about a weak part or one that adds nothing, or "" if there is no problem."""
    if way.way != "labels" or "accuracy" not in joined:
        return ""
    reached, first = joined["accuracy"], alone[0]["accuracy"]
    if first < WEAK or reached < first - LOSES:
        return (
            f"advice   part 0 alone reaches {first:.1%} and the joined network {reached:.1%}: the labels ask more of a "
            "weak part than it can give; use method='heads', or cut later"
        )
    if abs(reached - alone[-1]["accuracy"]) < NOTHING:
        return (
            f"advice   the last part adds nothing: the one before it, by its nearest label, reaches "
            f"{alone[-1]['accuracy']:.1%} and the joined network {reached:.1%}, since labels leave one point a class "
            f"(spread {alone[-1]['spread']:.2f}); method='heads' lets later parts learn"
        )
    return ""


def _value(values: dict[str, float]) -> str:
    return f"{values['accuracy']:.1%}" if "accuracy" in values else f"loss {values.get('loss', float('nan')):.4g}"
