"""Run one step on a copy of each network before any training, to report its mistakes before anything runs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.data.source import TensorSource
from shoal.engine.members.member import Member, draws, seeded
from shoal.engine.members.ownership import build_model
from shoal.engine.members.step import autocast, call_model, evaluating, number, run_step, targets_of
from shoal.engine.python_state.module_modes import enter_train_mode
from shoal.engine.python_state.preserve import preserved
from shoal.engine.tiers.evaluate import ValidationTotals, join_batches, measure, metric_columns
from shoal.engine.tracing.rate_reads import noting_rate_reads
from shoal.errors import JobError, ReadError, describe, describe_with_place
from shoal.jobs.job import RESERVED, Job
from shoal.preparation import hints
from shoal.utils.numpy_values import plain_number
from shoal.utils.random_state import Snapshot

ONE_VALUE = "Expected more than 1 value per channel"
"""The beginning of batch norm's error for a batch of one."""


def dry_run_noting_rates(member: Member, most_rows: int | None = None) -> tuple[tuple[list[str], set[str]], bool]:
    """Try a step, and return what `dry_run` does, and whether the code may read the rates of torch's dropout layers.

    What `torch.compile` has made is tried as it is, since the compiler would see what notices reads.
    """
    if _is_compiled(member):
        return dry_run(member, most_rows), True
    with noting_rate_reads() as reads:
        tried = dry_run(member, most_rows)
    return (dry_run(member, most_rows), True) if tried[0] else (tried, reads.seen)


def _is_compiled(member: Member) -> bool:
    job = member.job
    code = (*member.model.modules(), job.step, job.loss, *job.metrics.values())
    return any("_torchdynamo_orig_callable" in getattr(part, "__dict__", {}) for part in code) or any(
        isinstance(module, torch._dynamo.eval_frame.OptimizedModule) or module._compiled_call_impl is not None
        for module in member.model.modules()
    )


def dry_run(member: Member, most_rows: int | None = None) -> tuple[list[str], set[str]]:
    """Try a step on the first batch, and on a last batch of one row if there is one.

    Returns the mistakes and the columns that the history will have. The member is left unchanged; if that is not
    possible, nothing is tried.

    Args:
        most_rows: Try only so many rows, beside those with the smallest and the largest whole numbers, unless they show
            a mistake: then a step may need its whole batch.
    """
    job, n = member.job, member.num_rows
    sizes = [min(member.batch_size, n)]
    reached = job.steps is None or job.steps * job.accumulate >= member.num_batches
    if not member.batched and n % job.batch_size == 1 and n > 1 and job.batch_size > 1 and reached:
        sizes.append(1)
    roots = {"step": job.step, "loss": job.loss, "metrics": job.metrics, "model": member.model}
    with draws(member, keep=False), preserved(roots, skip=member.model) as state:
        member.modules.used = True
        if state.unrestorable:  # a dry step would use up what the first real step needs
            return [], set()
        columns, random_state = set[str](), Snapshot()
        extremes = [] if most_rows is None or member.batched or not job.shuffle else member.data.extremes()
        for size in sizes:
            few = size if most_rows is None or member.batched else most_rows + len(extremes)
            if few < size and not step_problems(member, few, False, columns, first=extremes):
                continue
            lines = step_problems(member, size, size != sizes[0], columns, first=extremes)
            if lines and step_problems(member, size, size != sizes[0], built=True, first=extremes):
                return lines, set()
        member.modules.used = state.may_draw or random_state.moved()
        if member.val is None:
            return [], columns
        lines = _metric_problems(member, columns)
        return (lines if lines and _metric_problems(member, built=True) else []), columns


def stop_problems(member: Member, columns: set[str]) -> list[str]:
    """Return a line if a job with `stop` watches something that its history will not have."""
    stop = member.job.stop
    if stop is None or not columns or stop.metric in columns:
        return []
    known = ", ".join(sorted(columns))
    return [
        f"stop watches {stop.metric!r}, which its first step does not give; it gives {known}: use one of these, or "
        "log it from the first step on, as NaN where it is not known yet"
    ]


def step_problems(
    member: Member,
    size: int,
    short: bool,
    columns: set[str] | None = None,
    built: bool = False,
    first: Sequence[int] = (),
) -> list[str]:
    """Return the mistakes that one step on a batch of `size` rows shows, and add the names that it logs to `columns`.

    Args:
        short: The batch stands for the shorter last batch of an epoch.
        built: Build the network again instead of copying it.
        first: Positions of rows that the batch begins with, before the first rows of the data.
    """
    job = member.job
    model = _similar_model(member, built)
    try:
        batch = member.data.pick(torch.tensor(list(dict.fromkeys([*first, *range(size)]))[:size]))
    except ReadError as error:
        return [f"data cannot be read: {error}"]
    except Exception as error:
        return read_problems(member, size, error)
    if member.device.type == "cuda":
        lines = _index_problems(member)
        if lines:
            return lines
    with torch.enable_grad(), autocast(job, member.device):
        if job.step is not None:
            try:
                loss, logs = run_step(job, model, batch)
            except Exception as error:
                return [_raised(member, "step", error, size, short) + hints.for_lists(batch, error)]
        else:
            if not isinstance(batch, (tuple, list, Mapping)) or len(batch) < 2:
                return [
                    f"a batch is a {type(batch).__name__}, but the loss takes (*inputs, targets); set step= or collate="
                ]
            try:
                targets_of(batch)
            except JobError as error:
                return list(error.lines)
            try:
                outputs = call_model(model, batch)
            except Exception as error:
                line = _raised(member, "forward", error, size, short) + hints.for_lists(batch, error)
                return [hints.other_dtype(model, batch, error) or line]
            lines = label_problems(job, outputs, member)
            if lines:
                return lines
            assert job.loss is not None
            try:
                loss, logs = job.loss(outputs, targets_of(batch)), {}
            except Exception as error:
                return [hints.loss_raised(outputs, targets_of(batch), error)]
    if columns is not None:
        columns |= {"loss", *logs}
    return loss_problems(job, loss, logs) or backward_problems(model, loss)


def read_problems(member: Member, size: int, error: Exception) -> list[str]:
    """Return a line if no row of the first batch can be read, or only its rows together cannot.

    If only some rows cannot be read, they end the job in training.
    """
    readable = 0
    for row in range(size):
        try:
            member.data.take(row, row + 1)
            readable += 1
        except Exception:
            continue
    if 0 < readable < size:
        return []
    what = hints.for_lengths(error) or "read them by themselves to see where"
    return [f"reading the first {size} rows of data raised {describe(error)}; {what}"]


def _similar_model(member: Member, built: bool = False) -> nn.Module:
    """Return a network like the member's: a copy, or one that is built again if it cannot be copied (lazy buffers).

    Args:
        built: Build it again in any case, since hooks of a copy may still be closures over the original.
    """
    if not built:
        try:
            return copy.deepcopy(member.model).to(member.device)  # .to() makes weights of RNNs contiguous again
        except Exception:
            pass
    with seeded(member.job.seed, member.device):
        model = build_model(member.job).to(member.device)
        enter_train_mode(model, member.built_in_eval)
        return model


def _index_problems(member: Member) -> list[str]:
    """Try two rows on a CPU copy first, since an index out of range on a GPU would destroy the CUDA context."""
    job = member.job
    rows = 1 if member.batched else min(2, len(member.data))
    batch = pytree.tree_map_only(Tensor, lambda t: t.cpu(), member.data.take(0, rows))
    try:
        model_copy = _similar_model(member).cpu()
        if job.step is None:
            call_model(model_copy, batch)
        else:
            run_step(job, model_copy, batch)
    except IndexError as error:
        return [f"forward raised {describe(error)} on the first rows; check indices and labels in data"]
    except Exception:
        return []  # the network may need the GPU: the dry step there decides
    return []


def _raised(member: Member, where: str, error: Exception, size: int, short: bool) -> str:
    """Return the line for an error that a dry step raised, with advice if batch norm saw one row."""
    job = member.job
    if ONE_VALUE in str(error):
        n = len(member.data)
        if member.batched:
            return (
                "the first batch of its DataLoader has 1 row, and batch norm cannot train on one value per channel; "
                "use a larger batch_size there"
            )
        if short:
            return (
                f"the last batch of an epoch has 1 row (data has {n}, batch_size is {job.batch_size}), and batch norm "
                "cannot train on one value per channel; set drop_last=True or another batch_size"
            )
        return (
            f"batch_size is {job.batch_size} and data has {n} rows: a batch norm would see a batch of {size}, "
            "one value per channel; use a larger batch_size"
        )
    what = f"a batch of {size} rows" if not short else f"the short last batch of {size} row"
    what = "the first batch of its DataLoader" if member.batched else what
    return f"{where} raised {describe_with_place(error)} on {what}; run it on one batch by itself to see where"


def loss_problems(job: Job, loss: Any, logs: dict[str, Any]) -> list[str]:
    """Check that a step gives a scalar loss that depends on the parameters, and logs of one number each."""
    what = "loss" if job.step is None else "step"
    if not isinstance(loss, Tensor):
        return [
            f"{what} gave a {type(loss).__name__}; it must give a tensor of one number"
            + (", or (loss, logs)" if job.step else "")
        ]
    if loss.ndim != 0:
        return [f"{what} gave a tensor of shape {list(loss.shape)}; it must be one number: take its mean"]
    if not loss.requires_grad:
        return [
            f"{what} gave a loss that depends on no trainable parameter; check requires_grad, detach() and no_grad()"
        ]
    lines = []
    for name, value in logs.items():
        if name in RESERVED:
            lines.append(f"step logs {name!r}, which is the name of a history column; call it something else")
        if not isinstance(plain_number(value), (int, float)) and not (isinstance(value, Tensor) and value.numel() == 1):
            lines.append(f"step logs {name!r} as a {type(value).__name__}; log numbers or tensors of one number")
    return lines


def backward_problems(model: nn.Module, loss: Tensor) -> list[str]:
    """Check that the step has not called loss.backward() itself."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if all(parameter.grad is None for parameter in trained):
        return []
    try:
        torch.autograd.grad(loss, trained, allow_unused=True)
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            return [
                "step calls backward() on the loss that it returns; leave that out: Shoal calls it, and the optimizer"
            ]
    return []


def label_problems(job: Job, outputs: Any, member: Member) -> list[str]:
    """For losses over class numbers, check that all targets in data and val are below the number of classes."""
    ignore = _ignored_label(job.loss)
    if ignore is None or not isinstance(outputs, Tensor) or outputs.ndim == 0:
        return []
    classes = outputs.shape[1] if outputs.ndim > 1 else outputs.shape[0]
    lines = []
    for which, view in (("data", member.data), ("val", member.val)):
        if view is None or not isinstance(view.source, TensorSource):
            continue
        content = view.source.whole()
        targets = content[-1] if isinstance(content, (tuple, list)) else None
        if (
            not isinstance(targets, Tensor)
            or targets.is_floating_point()
            or targets.is_complex()
            or targets.numel() == 0
        ):
            continue
        if view.index is not None:
            targets = targets[view.index.to(targets.device)]
        targets = targets[targets != ignore]
        if targets.numel() and (int(targets.min()) < 0 or int(targets.max()) >= classes):
            lines.append(
                f"{which} has labels from {int(targets.min())} to {int(targets.max())}, but the model gives "
                f"{classes} classes; use labels 0 to {classes - 1}, or a wider last layer"
            )
    return lines


def _ignored_label(loss: Any) -> int | None:
    """Return the label that the loss ignores, or None if it is not a loss over class numbers."""
    if loss is F.cross_entropy or loss is F.nll_loss:
        return -100
    if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return loss.ignore_index
    function = getattr(loss, "func", None)  # functools.partial
    if function is F.cross_entropy or function is F.nll_loss:
        return int(loss.keywords.get("ignore_index", -100))
    return None


def _metric_problems(member: Member, columns: set[str] | None = None, built: bool = False) -> list[str]:
    """Try the validation step and the metrics on the first validation rows; of metrics, report only wrong calls and
    names."""
    job = member.job
    assert member.val is not None
    size = 1 if member.val.source.batched else min(job.batch_size, len(member.val))
    model, totals = _similar_model(member, built), ValidationTotals(job)
    try:
        batch = member.val.take(0, size)
        if job.metrics:
            targets_of(batch)
    except ReadError as error:
        return [f"val cannot be read: {error}"]
    except JobError as error:
        return [f"val: {error.lines[0]}"]
    except Exception as error:
        return [f"reading the first rows of val raised {describe(error)}; read them by themselves to see where"]
    try:
        with evaluating(model), autocast(job, member.device):
            totals.add(model, batch)
    except Exception as error:
        rows = f"the first {size} rows" if not member.val.source.batched else "the first batch"
        return [f"validating on {rows} of val raised {describe_with_place(error)}; check val against data"]
    if columns:
        columns |= {*totals.sums, *metric_columns(job)}
    lines = []
    for name, metric in job.metrics.items():
        try:
            value = measure(metric, join_batches(totals.outputs), targets_of(batch))
            for each in value.values() if isinstance(value, Mapping) else [value]:
                if not _is_number(each):
                    kind = "a tensor" if isinstance(each, Tensor) else "an array"
                    shaped = isinstance(each, Tensor | np.ndarray)
                    what = f"{kind} of shape {list(each.shape)}" if shaped else " ".join(repr(each).split())[:60]
                    lines.append(f"metric {name!r} gave {what}; it must be one number")
        except (TypeError, AttributeError, NameError) as error:
            lines.append(f"metric {name!r} raised {describe_with_place(error)}; it is called as (outputs, targets)")
        except Exception:
            continue
    return lines


def _is_number(value: Any) -> bool:
    try:
        number(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True
