"""From fields with their lines to jobs."""

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
from shoal.jobfile._references import Mistake, bound, check_arguments, find, guarded, noted, split
from shoal.jobfile._tree import Node, Problems, shown
from shoal.jobfile._values import check_hparams, check_schedule, fold_settings, stop, tuples
from shoal.jobs.job import Job
from shoal.models import MODELS
from shoal.preparation.checks import field_problems
from shoal.preparation.folds import folds

CALLED = {"loss": 2, "step": 2, "collate": 1, "params": 1}
"""Functions named in a file, and with how many values they are called."""
WANTED = {
    "hparams": "a table",
    "stop": "a table",
    "metrics": "a list of names, or a table of functions by name",
    "loss": "a name, or a table with `use`",
}
WRONG = object()
"""In place of a field's value that could not be made."""


class Builder:
    """Makes jobs from cases; data and imports are shared among them."""

    def __init__(self, folder: Path, problems: Problems) -> None:
        self.folder = folder
        self.problems = problems
        self.keys_are_wrong = bool(problems)
        """What is missing may then be there under a wrong key: only other mistakes are reported."""
        self.places: dict[str, Places] = {}
        """Job name -> the lines of its fields."""
        self._made: dict[Any, Any] = {}
        self._mistakes: dict[tuple[Any, int], Mistake] = {}

    def jobs(self, case: Case) -> list[Job]:
        """The job of a case, or its folds; empty where something is wrong with it."""
        made = {name: self._field(name, node) for name, node in case.fields.items() if name not in ("name", "val")}
        if any(value is WRONG for value in made.values()):
            return []
        place = Places(case.fields, case.line)
        with noted(self.problems):
            if not self._complete(case):
                return []
            self._hparams(case, made.get("optimizer", torch.optim.AdamW))
            if "val" in case.fields:
                made["data"], made["val"] = self._validation(case.fields["val"], made["data"])
            schedule = made.pop("schedule", None)
            job = self._job({**made, "name": case.name}, place)
            self._check_schedule(job, schedule, case)
            parts = [job] if case.folds is None else self._folds(job, case.folds)
            parts = [self._scheduled(part, schedule, case) for part in parts]
            self.places.update({part.name: place for part in parts})
            for line in field_problems(parts[0]):
                raise Mistake(place.line_of(line), line)
            return parts
        return []

    def _complete(self, case: Case) -> bool:
        """Whether a job has what every job needs."""
        given = case.fields
        missing = [name for name in ("model", "data") if name not in given]
        if self.keys_are_wrong:
            return not missing and ("loss" in given or "step" in given) and ("epochs" in given or "steps" in given)
        if missing:
            raise Mistake(case.line, f"a job has no {' and no '.join(missing)}; set {' = ..., '.join(missing)} = ...")
        return True

    def _hparams(self, case: Case, optimizer: Any) -> None:
        node = case.fields.get("hparams")
        key = ("hparams", id(optimizer), repr(node.plain() if node is not None else None))

        line = node.line if node is not None else case.line
        self._once(key, line, lambda: check_hparams(optimizer, node, case.line))

    def _job(self, made: dict[str, Any], place: Places) -> Job:
        try:
            return Job(**made)
        except JobError as error:
            label = f"job {made['name']!r}: "
            lines = [text.removeprefix(label).replace("True or False", "true or false") for text in error.lines]
        for line in lines:
            self.problems.add(place.line_of(line), line)
        raise Mistake(place.line_of(lines[0]), lines[0])

    def _field(self, name: str, node: Node) -> Any:
        """One field's value; mistakes are noted."""
        with noted(self.problems):
            if name in TABLES and not node.is_table:
                raise Mistake(node, f"{name} is {node.shown()} ({node.kind}); use {WANTED.get(name, WANTED['loss'])}")
            if name in ("model", "data", "schedule", "optimizer", "metrics", *CALLED):
                return self._once((name, repr(node.plain())), node.line, lambda: self._reference(name, node))
            if name == "hparams":
                return {key: tuples(child.plain()) for key, child in node.value.items()}
            return stop(node) if name == "stop" else node.plain()
        return WRONG

    def _once(self, key: Any, line: int, make: Callable[[], Any]) -> Any:
        """What was made before under this key, wherever; or the mistake that came of it on this line."""
        if key not in self._made and (key, line) not in self._mistakes:
            try:
                self._made[key] = make()
            except Mistake as mistake:
                self._mistakes[key, line] = mistake
        if key not in self._made:
            raise self._mistakes[key, line]
        return self._made[key]

    def _reference(self, name: str, node: Node) -> Any:
        if name == "model":
            return self._model(node)
        if name == "data":
            return self._data("data", node)
        if name == "optimizer":
            return self._optimizer(node)
        if name == "metrics":
            return {key: self._metric(child) for key, child in node.value.items()}
        use, arguments = split(name, node)
        if name == "schedule":
            return self._schedule(use, arguments)
        table: Mapping[str, Any] = _known.LOSSES if name == "loss" else {}
        return self._function(name, use, arguments, table, CALLED[name])

    def _function(
        self, name: str, use: Node, arguments: Mapping[str, Node], table: Mapping[str, Any], given: int
    ) -> Any:
        reference = find(name, use, table, self.folder)
        if isinstance(reference, type):  # such as nn.CrossEntropyLoss: built once, then called
            check_arguments(name, use, reference, arguments)
            plain = {key: child.plain() for key, child in arguments.items()}
            reference, arguments = guarded(use, f"{name}: building {use.value!r}", lambda: reference(**plain)), {}
        if not callable(reference):
            raise Mistake(use, f"{name}: {use.value!r} is a {type(reference).__name__}; name a function")
        check_arguments(name, use, reference, arguments, given)
        return bound(reference, arguments)

    def _metric(self, node: Node) -> Any:
        node = node if node.is_table else Node({"use": node}, node.line)
        use, arguments = split("metric", node)
        return self._function("metric", use, arguments, _known.METRICS, 2)

    def _model(self, node: Node) -> Any:
        use, arguments = split("model", node)
        reference = find("model", use, MODELS, self.folder)
        if isinstance(reference, nn.Module):
            if arguments:
                raise Mistake(use, f"model: {use.value!r} is a network already and takes no arguments; name its class")
            return reference
        if not callable(reference) or (isinstance(reference, type) and not issubclass(reference, nn.Module)):
            kind = reference.__name__ if isinstance(reference, type) else type(reference).__name__
            raise Mistake(
                use, f"model: {use.value!r} is {kind}; name an nn.Module class, or a function that builds one"
            )
        check_arguments("model", use, reference, arguments, typed=reference in MODELS.values())
        return bound(reference, arguments)

    def _optimizer(self, node: Node) -> Any:
        if not isinstance(node.value, str):
            more = "; its settings go into hparams" if node.is_table else ""
            raise Mistake(node, f"optimizer is {node.shown()} ({node.kind}); use a name such as 'AdamW'{more}")
        reference = find("optimizer", node, _known.OPTIMIZERS, self.folder)
        if not callable(reference) or (isinstance(reference, type) and not issubclass(reference, Optimizer)):
            raise Mistake(node, f"optimizer: {node.value!r} is no torch.optim.Optimizer; name a class of those")
        return reference

    def _schedule(self, use: Node, arguments: Mapping[str, Node]) -> Any:
        reference = find("schedule", use, {**_known.OVERS, **_known.SCHEDULERS}, self.folder)
        if isinstance(reference, type) and issubclass(reference, _known.Over):
            open_arguments = {name: node for name, node in arguments.items() if name != "total"}
            if len(open_arguments) < len(arguments):
                raise Mistake(arguments["total"], f"schedule {use.value!r} finds its total by itself; remove it")
            check_arguments("schedule", use, partial(reference, total=1), arguments, typed=True)
            plain = {name: node.plain() for name, node in arguments.items()}
            return _value_checked(use, "schedule", lambda: reference(**plain))
        if not callable(reference):
            raise Mistake(
                use, f"schedule: {use.value!r} is a {type(reference).__name__}; name a function or a scheduler"
            )
        check_arguments("schedule", use, reference, arguments, 1)
        return bound(reference, arguments)

    def _scheduled(self, job: Job, schedule: Any, case: Case) -> Job:
        """The schedule last: its length may follow from the data."""
        if schedule is None:
            return job
        if isinstance(schedule, _known.Over):
            schedule = replace(schedule, total=_length(job, self._rows(job)))
        return replace(job, schedule=schedule)

    def _check_schedule(self, job: Job, schedule: Any, case: Case) -> None:
        if schedule is not None:
            node = case.fields["schedule"]
            key = ("try", id(schedule), id(job.optimizer), repr(sorted(job.hparams)))
            self._once(key, node.line, lambda: check_schedule(node, job, schedule))

    def _data(self, field: str, node: Node) -> Any:
        use, arguments = split(field, node)
        text = str(use.value)
        suffix = Path(text).suffix.lower()
        if suffix in _datafiles.READERS and ":" not in text:
            return self._data_file(field, use, arguments, _datafiles.READERS[suffix])
        if ":" not in text and text not in _datafiles.BUILT_IN and (suffix or "/" in text or "\\" in text):
            ends = ", ".join(_datafiles.READERS)
            raise Mistake(use, f"{field} {text!r} is no kind of file that is known; end its name in {ends}")
        reference = find(field, use, _datafiles.BUILT_IN, self.folder)
        plain = {key: child.plain() for key, child in arguments.items()}
        if text in _datafiles.BUILT_IN:
            check_arguments(field, use, reference, arguments, typed=True)
            return _value_checked(use, f"{field} {text!r}", lambda: reference(**plain))
        if not callable(reference) or isinstance(reference, (Tensor, nn.Module)):
            if arguments:
                raise Mistake(use, f"{field}: {text!r} is no function and takes no arguments")
            return reference
        check_arguments(field, use, reference, arguments)
        return guarded(use, f"{field}: calling {text!r}", lambda: reference(**plain))

    def _data_file(self, field: str, use: Node, arguments: Mapping[str, Node], reader: Callable[..., Any]) -> Any:
        path = self.folder / str(use.value)
        check_arguments(field, use, reader, arguments, 1, typed=True)
        for name in ("inputs",):
            node = arguments.get(name)
            words = node.plain() if node is not None else ""
            if not isinstance(words, (str, list)) or not all(isinstance(word, str) for word in words):
                raise Mistake(arguments[name], f"{field}.{name} is {arguments[name].shown()}; use a list of names")
        if not _is(path.is_file):
            what = "is a folder" if _is(path.is_dir) else "is not there"
            raise Mistake(use, f"{field} file {shown(use.value)} {what}; paths are taken from the job file's folder")
        plain = {key: child.plain() for key, child in arguments.items()}
        return _value_checked(use, f"{field} file {shown(use.value)}", lambda: reader(path, **plain))

    def _validation(self, node: Node, data: Any) -> tuple[Any, Any]:
        """Data to train on and to validate on: data of its own, or a share of the rows."""
        share = node.value.get("share") if node.is_table else node
        if node.is_table and share is None:
            return data, self._once(("data", repr(node.plain())), node.line, lambda: self._data("val", node))
        assert share is not None
        number = share.value
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < 1:
            raise Mistake(share, f"val is {share.shown()}; use a share of the rows between 0 and 1, or data")
        seed = node.value.get("seed", Node(0, node.line)) if node.is_table else Node(0, node.line)
        unknown = [key for key in node.value if key not in ("share", "seed")] if node.is_table else []
        if unknown:
            raise Mistake(node.value[unknown[0]], f"val has no {unknown[0]!r}; with share it takes seed alone")
        if isinstance(seed.value, bool) or not isinstance(seed.value, int):
            raise Mistake(seed, f"val.seed is {seed.shown()}; use a whole number")
        key = ("share", id(data), number, seed.value)
        made = self._once(key, node.line, lambda: (data, *self._shared_out(node, data, number, seed.value)))
        return made[1], made[2]

    def _shared_out(self, node: Node, data: Any, share: float, seed: int) -> tuple[Rows, Rows]:
        n = self._count(node, data)
        taken = round(n * share)
        if not 0 < taken < n:
            raise Mistake(node, f"val is {share} of {n} rows, which leaves nothing on one side; use another share")
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed % 2**63))
        return Rows(data, order[taken:].sort().values), Rows(data, order[:taken].sort().values)

    def _count(self, node: Node, data: Any) -> int:
        job = Job(model=nn.Identity(), data=data, loss=nn.functional.mse_loss, epochs=1)
        try:
            return len(open_data(Pool(torch.device("cpu")), job, "data"))
        except JobError as error:
            raise Mistake(node, error.lines[0]) from None

    def _rows(self, job: Job) -> int:
        return len(job.data) if isinstance(job.data, Rows) else self._count(Node(None, 1), job.data)

    def _folds(self, job: Job, node: Node) -> list[Job]:
        settings = fold_settings(node)
        if job.val is not None:
            raise Mistake(node, "there are both folds and val; folds validate on their own parts: remove one of them")
        try:
            return folds(job, **settings)
        except JobError as error:
            raise Mistake(node, error.lines[0].partition(": ")[2].replace("k is", "folds is")) from None


def _is(test: Callable[[], bool]) -> bool:
    """Whether a path is this; a name that no file can have is nothing."""
    try:
        return test()
    except (OSError, ValueError):
        return False


def _value_checked(use: Node, what: str, call: Callable[[], Any]) -> Any:
    """Our own readers say what is wrong in a ValueError; anything else they raise is reported with its kind."""
    try:
        return call()
    except (ValueError, OSError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise Mistake(use, f"{what}: {text}") from None
    except Exception as error:
        raise Mistake(use, f"{what} cannot be read ({type(error).__name__}: {error})") from None


def _length(job: Job, rows: int) -> int:
    """Steps of a job, or epochs where its schedule goes by them."""
    batches = rows // job.batch_size if job.drop_last else -(-rows // job.batch_size)
    per_epoch = max(1, -(-batches // job.accumulate))
    if job.schedule_every == "epoch":
        return job.epochs if job.epochs is not None else -(-(job.steps or 0) // per_epoch)
    return job.steps if job.steps is not None else (job.epochs or 0) * per_epoch
