"""Build jobs from fields with their lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.data import Pool, Rows
from shoal.engine.members.member import open_data
from shoal.errors import JobError
from shoal.jobfile import _datafiles, _known
from shoal.jobfile._blocks import TABLES, Case
from shoal.jobfile._places import Places
from shoal.jobfile._references import bound, check_arguments, check_file, find, guarded, split
from shoal.jobfile._tree import Mistake, Node, Problems
from shoal.jobfile._values import make_average, make_folds, make_hparams, make_stop
from shoal.jobs.job import Job
from shoal.jobs.loaders import gives_batches
from shoal.models import MODELS
from shoal.preparation.checks import field_problems

CALLED = {"loss": 2, "step": 2, "collate": 1, "params": 1}
"""Functions named in a file, and the number of values with which each is called."""
WANTED = {
    "hparams": "a table",
    "config": "a table",
    "stop": "a table",
    "metrics": "a list of names, or a table of functions by name",
}
WRONG = object()
"""Stands for a field's value that could not be made."""


class Builder:
    """Builds jobs from cases, which share data and imports."""

    def __init__(self, folder: Path, problems: Problems) -> None:
        self.folder = folder
        self.problems = problems
        self.keys_are_wrong = bool(problems)
        """Whether a key is unknown. A missing field may then be there under a wrong key, so it is not reported."""
        self.places: dict[str, Places] = {}
        """Job name -> the lines of its fields."""
        self._made: dict[Any, Any] = {}
        self._mistakes: dict[tuple[Any, int], Mistake] = {}
        self._makers: dict[str, Callable[[Node], Any]] = {
            "model": self._model,
            "data": partial(self._data, "data"),
            "optimizer": self._optimizer,
            "metrics": self._metrics,
            "schedule": self._schedule,
            "hparams": make_hparams,
            "stop": make_stop,
            "average": make_average,
            **{name: partial(self._function, name) for name in CALLED},
        }
        """Field -> the function that makes its value; other fields are plain values."""

    def jobs(self, case: Case) -> list[Job]:
        """Return the job of a case, or its folds, or an empty list if there is a mistake in it."""
        values = {name: self._field(name, node) for name, node in case.fields.items() if name not in ("name", "val")}
        if any(value is WRONG for value in values.values()):
            return []
        lines = Places(case.fields, case.line)
        try:
            if not self._complete(case):
                return []
            if "val" in case.fields:
                values["data"], values["val"] = self._validation(case.fields["val"], values["data"])
            schedule = values.pop("schedule", None)
            job = self._job({**values, "name": case.name}, lines)
            self._check_hparams(job.optimizer, case)
            parts = [job] if case.folds is None else make_folds(case.folds, job)
            parts = [self._scheduled(part, schedule) for part in parts]
            self.places.update({part.name: lines for part in parts})
            for line in field_problems(parts[0]):
                raise Mistake(lines.line_of(line), line)
            return parts
        except Mistake as mistake:
            self.problems.note(mistake)
            return []

    def _complete(self, case: Case) -> bool:
        """Return whether a job has the fields that every job needs."""
        fields = case.fields
        missing = [name for name in ("model", "data") if name not in fields]
        if self.keys_are_wrong:
            return not missing and ("loss" in fields or "step" in fields) and ("epochs" in fields or "steps" in fields)
        if missing:
            raise Mistake(case.line, f"a job has no {' and no '.join(missing)}; set {' = ..., '.join(missing)} = ...")
        return True

    def _job(self, values: dict[str, Any], places: Places) -> Job:
        try:
            return Job(**values)
        except JobError as error:
            label = f"job {values['name']!r}: "
            lines = [text.removeprefix(label).replace("True or False", "true or false") for text in error.lines]
        for line in lines:
            self.problems.add(places.line_of(line), line)
        raise Mistake(places.line_of(lines[0]), lines[0])

    def _check_hparams(self, optimizer: Any, case: Case) -> None:
        hparams = case.fields.get("hparams", Node({}, case.line))
        name = getattr(optimizer, "__name__", "the optimizer")
        key = ("hparams", id(optimizer), repr(hparams.plain()))
        call = partial(check_arguments, "hparams", Node(name, hparams.line), optimizer, hparams.value, 1, typed=True)
        self._once(key, hparams.line, call)

    def _field(self, name: str, node: Node) -> Any:
        """Return the value of one field, or WRONG after adding the mistake to `problems`."""
        try:
            if name in TABLES and not node.is_table:
                expected = WANTED.get(name, "a name, or a table with `use`")
                raise Mistake(node, f"{name} is {node.shown()} ({node.kind}); use {expected}")
            if name not in self._makers:
                return node.plain()
            return self._once((name, repr(node.plain())), node.line, lambda: self._makers[name](node))
        except Mistake as mistake:
            self.problems.note(mistake)
            return WRONG

    def _once(self, key: Any, line: int, make: Callable[[], Any]) -> Any:
        """Return the value that was made before under this key, or make it; a mistake is repeated for each line that
        has it."""
        if key not in self._made and (key, line) not in self._mistakes:
            try:
                self._made[key] = make()
            except Mistake as mistake:
                self._mistakes[key, line] = mistake
        if key not in self._made:
            raise self._mistakes[key, line]
        return self._made[key]

    def _reference(self, field: str, node: Node, known: Mapping[str, Any], given: int = 0) -> Any:
        """Return the class or function that a field names, with its arguments; it is called with `given` further
        values."""
        use, arguments = split(field, node)
        reference = find(field, use, known, self.folder)
        if not callable(reference):
            raise Mistake(use, f"{field}: {use.value!r} is {type(reference).__name__}; name a class or a function")
        check_arguments(field, use, reference, arguments, given, typed=reference in known.values())
        return bound(reference, arguments)

    def _function(self, name: str, node: Node, known: Mapping[str, Any] = _known.LOSSES) -> Any:
        """Return the function that a field names; a class is instantiated first."""
        use, _ = split(name, node)
        known = known if name in ("loss", "metric") else {}
        given = CALLED.get(name, 2)
        if not isinstance(find(name, use, known, self.folder), type):
            return self._reference(name, node, known, given)
        make = self._reference(name, node, known)  # a class such as nn.CrossEntropyLoss is built once, then called
        function = guarded(use, f"{name}: building {use.value!r}", make)
        check_arguments(name, use, function, {}, given)
        return function

    def _metrics(self, node: Node) -> dict[str, Any]:
        metrics = {}
        for key, child in node.value.items():
            table = child if child.is_table else Node({"use": child}, child.line)
            metrics[key] = self._function("metric", table, _known.METRICS)
        return metrics

    def _model(self, node: Node) -> Any:
        use, arguments = split("model", node)
        reference = find("model", use, MODELS, self.folder)
        if isinstance(reference, nn.Module) and arguments:
            raise Mistake(use, f"model: {use.value!r} is a network already and takes no arguments; name its class")
        return reference if isinstance(reference, nn.Module) else self._reference("model", node, MODELS)

    def _optimizer(self, node: Node) -> Any:
        if not isinstance(node.value, str):
            more = "; its settings go into hparams" if node.is_table else ""
            raise Mistake(node, f"optimizer is {node.shown()} ({node.kind}); use a name such as 'AdamW'{more}")
        reference = find("optimizer", node, _known.OPTIMIZERS, self.folder)
        if not callable(reference) or (isinstance(reference, type) and not issubclass(reference, Optimizer)):
            raise Mistake(node, f"optimizer: {node.value!r} is not a torch.optim.Optimizer; name a class of those")
        return reference

    def _schedule(self, node: Node) -> Any:
        use, arguments = split("schedule", node)
        if use.value.lower() not in _known.OVERS:
            return self._reference("schedule", node, {**_known.OVERS, **_known.SCHEDULERS}, 1)
        if "total" in arguments:
            raise Mistake(arguments["total"], f"schedule {use.value!r} computes its total itself; remove it")
        return guarded(use, "schedule", self._reference("schedule", node, _known.OVERS), ours=True)

    def _scheduled(self, job: Job, schedule: Any) -> Job:
        """Return the job with its schedule, which is added last because its length may depend on the data."""
        if schedule is None:
            return job
        if isinstance(schedule, _known.Over):
            rows = len(job.data) if isinstance(job.data, Rows) else self._count(Node(None, 1), job.data)
            if not rows and job.steps is None and job.schedule_every == "step":
                raise Mistake(Node(None, 1), "the schedule needs a length, which the data does not say; set steps")
            schedule = replace(schedule, total=_length(job, rows))
        return replace(job, schedule=schedule)

    def _data(self, field: str, node: Node) -> Any:
        """Return the data that a field names: a file, built-in data, or the result of a function."""
        use, arguments = split(field, node)
        text = str(use.value)
        suffix = Path(text).suffix.lower()
        if suffix in _datafiles.READERS and ":" not in text:
            reader = _datafiles.READERS[suffix]
            check_arguments(field, use, reader, arguments, 1, typed=True)
            what = f"{field} file {use.shown()}"
            check_file(what, use, self.folder / text)
            return guarded(use, what, partial(bound(reader, arguments), self.folder / text), ours=True)
        if ":" not in text and text not in _datafiles.BUILT_IN and (suffix or "/" in text or "\\" in text):
            ends = ", ".join(_datafiles.READERS)
            raise Mistake(use, f"{field} {text!r} is not a known kind of file; end its name in {ends}")
        reference = find(field, use, _datafiles.BUILT_IN, self.folder)
        if not callable(reference) or isinstance(reference, (Tensor, nn.Module)):
            if arguments:
                raise Mistake(use, f"{field}: {text!r} is not a function and takes no arguments")
            return reference
        ours = text in _datafiles.BUILT_IN
        check_arguments(field, use, reference, arguments, typed=ours)
        return guarded(use, f"{field}: calling {text!r}", bound(reference, arguments), ours=ours)

    def _validation(self, node: Node, data: Any) -> tuple[Any, Any]:
        """Return the data to train on and to validate on, which is other data or a share of the rows."""
        share = node.value.get("share") if node.is_table else node
        if node.is_table and share is None:
            return data, self._once(("data", repr(node.plain())), node.line, lambda: self._data("val", node))
        assert share is not None
        table = node.value if node.is_table else {"share": share}
        check_arguments("val", Node(table, node.line), _share, table, typed=True)
        number, seed = share.value, table["seed"].value if "seed" in table else 0
        if not 0 < number < 1:
            raise Mistake(share, f"val is {share.shown()}; use a share of the rows between 0 and 1, or data")
        key = ("share", id(data), number, seed)
        rows = self._once(key, node.line, lambda: (data, *self._split_rows(node, data, number, seed)))
        return rows[1], rows[2]

    def _split_rows(self, node: Node, data: Any, share: float, seed: int) -> tuple[Rows, Rows]:
        if gives_batches(data):
            raise Mistake(node, "data is a DataLoader, whose rows have no numbers; give val data of its own")
        n = self._count(node, data)
        num_val = round(n * share)
        if not 0 < num_val < n:
            raise Mistake(node, f"val is {share} of {n} rows, which leaves nothing on one side; use another share")
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed % 2**63))
        return Rows(data, order[num_val:].sort().values), Rows(data, order[:num_val].sort().values)

    def _count(self, node: Node, data: Any) -> int:
        job = Job(model=nn.Identity(), data=data, loss=nn.functional.mse_loss, epochs=1)
        try:
            return len(open_data(Pool(torch.device("cpu")), job, "data"))
        except JobError as error:
            raise Mistake(node, error.lines[0]) from None


def _share(share: float, seed: int = 0) -> None:
    """Define the keys of a `val` table that takes a share of the rows."""


def _length(job: Job, rows: int) -> int:
    """Return the steps of a job, or its epochs if its schedule is stepped per epoch."""
    batches = rows // job.batch_size if job.drop_last else -(-rows // job.batch_size)
    batches = rows if gives_batches(job.data) else batches
    per_epoch = max(1, -(-batches // job.accumulate))
    if job.schedule_every == "epoch":
        return job.epochs if job.epochs is not None else -(-(job.steps or 0) // per_epoch)
    return job.steps if job.steps is not None else (job.epochs or 0) * per_epoch
