"""What a step reaches: found, watched and put back; and what is a library's is left alone."""

from __future__ import annotations

import argparse
import array
import contextvars
import functools
import itertools
import logging
import multiprocessing
import random
import sys
import types
import weakref
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Queue
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor, nn

from shoal.engine.python_state import places, preserve
from shoal.engine.python_state.places import path_text
from shoal.engine.python_state.preserve import PythonState, preserved
from shoal.engine.python_state.user_code import is_library_class, is_library_function, is_library_module

LOGGER = logging.getLogger("a logger of the user's")
BETA = 0.0
LATER: int
SECRET = random.SystemRandom()
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("variable", default=0.0)
SETTINGS = types.ModuleType("settings_of_a_user")
SETTINGS.gamma = 0.0  # type: ignore[attr-defined]


class Config:
    beta = 0.0


@dataclass(frozen=True)
class Frozen:
    beta: float = 0.0


@dataclass(slots=True)
class Slotted:
    beta: float = 0.0


class WithProperty:
    def __init__(self) -> None:
        self._beta = 0.0

    @property
    def beta(self) -> float:
        return self._beta


def reads_global() -> float:
    return BETA


def writes_global() -> None:
    global BETA
    BETA = 1.0


def makes_global() -> None:
    global LATER
    LATER = 1


def reads_class() -> float:
    return Config.beta


def reads_module() -> Any:
    return SETTINGS.gamma


def reads_variable() -> float:
    return VARIABLE.get()


def closure_of(value: Any) -> Callable[[], Any]:
    return lambda: value


def with_default(values: Any = [0.0]) -> Any:  # noqa: B006
    return values


@functools.cache
def cached() -> float:
    return BETA


def set_frozen(value: Frozen) -> None:
    object.__setattr__(value, "beta", 1.0)


def change_cell(function: Any) -> None:
    function.__closure__[0].cell_contents = 1.0


def has_attribute() -> None:
    return


has_attribute.beta = 0.0  # type: ignore[attr-defined]


class Attributed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.beta, self.table = nn.Linear(2, 2), 0.0, torch.zeros(3)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "a global": (lambda: reads_global, lambda _: writes_global(), "BETA of module"),
    "an attribute of a class": (lambda: reads_class, lambda _: setattr(Config, "beta", 1.0), "Config.beta"),
    "a global of another module": (lambda: reads_module, lambda _: setattr(SETTINGS, "gamma", 1.0), "settings_of_a"),
    "a context variable": (lambda: reads_variable, lambda _: VARIABLE.set(1.0), "VARIABLE"),
    "a closure": (lambda: closure_of(0.0), change_cell, "value in the closure of root"),
    "a dict": (lambda: closure_of({"beta": 0.0}), lambda f: f().update(beta=1.0), "value['beta'] in the closure"),
    "another order": (lambda: OrderedDict(a=1, b=2), lambda d: d.move_to_end("a"), "root"),
    "a key that goes": (lambda: {"a": 1, "b": 2}, lambda d: d.pop("a"), "root['a']"),
    "a user's dict": (lambda: UserDict(beta=0.0), lambda d: d.update(beta=1.0), "root.data['beta']"),
    "a list": (lambda: [0.0], lambda value: value.append(1.0), "root"),
    "a deque": (lambda: deque([0.0], maxlen=2), lambda value: value.append(1.0), "root"),
    "a set": (lambda: {1, 2}, lambda value: value.discard(1), "root"),
    "a default": (lambda: with_default, lambda f: f().append(1.0), "root.__defaults__[0]"),
    "a partial's keywords": (lambda: functools.partial(max, default=0), lambda p: p.keywords.update(default=1), "def"),
    "a bound append": (lambda: [].append, lambda append: append(1), "root.__self__"),
    "an attribute of a function": (lambda: has_attribute, lambda f: setattr(f, "beta", 1.0), "root.beta"),
    "a function behind a cache": (lambda: cached, lambda _: writes_global(), "BETA of module"),
    "a namespace": (lambda: argparse.Namespace(beta=0.0), lambda n: setattr(n, "beta", 1.0), "root.beta"),
    "a frozen dataclass": (Frozen, set_frozen, "root.beta"),
    "slots": (Slotted, lambda value: setattr(value, "beta", 1.0), "root.beta"),
    "behind a property": (WithProperty, lambda value: setattr(value, "_beta", 1.0), "root._beta"),
    "behind a weak reference": (lambda: weakref.ref(LOOSE), lambda ref: setattr(ref(), "_beta", 1.0), "root()._beta"),
    "an attribute of a module": (Attributed, lambda model: setattr(model, "beta", 1.0), "root.beta"),
    "a tensor": (Attributed, lambda model: model.table.add_(1.0), "root.table"),
    "a tensor's data": (Attributed, lambda model: model.table.data.add_(1.0), "root.table"),
    "an array": (lambda: closure_of(np.zeros(3)), lambda f: f().__setitem__(1, 1.0), "value in the closure"),
    "a buffer": (lambda: bytearray(b"a"), lambda value: value.append(1), "root"),
    "a buffer of numbers": (lambda: array.array("d", [0.0]), lambda value: value.append(1.0), "root"),
    "a shared value": (lambda: SHARED, lambda value: setattr(value, "value", 1.0), "root"),
    "a queue": (lambda: Queue[float](), lambda value: value.put(1.0), "root.queue"),
    "a series": (lambda: pandas.Series({"beta": 0.0}), lambda value: value.__setitem__("beta", 1.0), "root"),
    "a frame": (lambda: pandas.DataFrame({"a": [0.0]}), lambda value: value.loc.__setitem__(1, 2.0), "root"),
    "python's random numbers": (lambda: random.Random(0), lambda value: value.random(), "root"),
    "numpy's random numbers": (lambda: np.random.default_rng(0), lambda value: value.normal(), "root"),
    "numpy's old random numbers": (lambda: np.random.RandomState(0), lambda value: value.normal(), "root"),
    "torch's random numbers": (torch.Generator, lambda value: torch.rand(1, generator=value), "root"),
}
LOOSE = WithProperty()
SHARED = multiprocessing.Value("d", 0.0)


def held(value: Any) -> Any:
    """All that a value holds, to be compared before and after."""
    return [(place.path, place.get()) for place in PythonState({"root": value}).places]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_named_and_put_back(name: str) -> None:
    make, change, where = CHANGES[name]
    value = make()
    before = held(value)
    with preserved({"root": value}) as state:
        assert not state.changes()
        change(value)
        assert state.changed or state.written
        assert where in path_text(state.changes()[0]), state.changes()
    assert not PythonState({"root": value}).changes()
    assert str(held(value)) == str(before)


def test_a_global_that_did_not_exist_is_taken_away_again() -> None:
    with preserved({"root": makes_global}):
        makes_global()
        assert "LATER" in globals()
    assert "LATER" not in globals()


def test_a_count_is_put_back_by_a_copy_and_a_generator_is_named() -> None:
    def numbers() -> Iterator[int]:
        yield from range(9)

    holder = {"count": itertools.count(), "list": iter([1, 2, 3]), "generator": numbers()}
    with preserved({"root": holder}) as state:
        assert [path_text(path) for path in state.unrestorable] == ["root['generator']"]
        for iterator in holder.values():
            next(iterator)
        assert {path_text(path) for path in state.changes()} == {"root['count']", "root['list']", "root['generator']"}
    assert next(holder["count"]) == 0 and next(holder["list"]) == 1 and next(holder["generator"]) == 1


def test_python_and_numpy_draw_as_if_nothing_had_been() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()
    with preserved({}):
        random.random(), np.random.normal()
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def uses_libraries(model: nn.Module) -> Tensor:
    LOGGER.debug("it is called")
    logging.getLogger("one that a library makes").debug("here")
    SECRET.random()
    return torch.nn.functional.relu(model(torch.ones(2)))


def test_a_librarys_tables_are_neither_watched_nor_written() -> None:
    table = logging.root.manager.loggerDict
    state = PythonState({"step": uses_libraries, "model": nn.Linear(2, 2)})
    owners = {id(place.owner) for place in state.places}
    assert id(table) not in owners and id(vars(LOGGER)) not in owners and id(vars(torch)) not in owners
    before = dict(table)
    with preserved({"step": uses_libraries}) as state:
        uses_libraries(nn.Linear(2, 2))
        assert not state.changes()
    assert logging.root.manager.loggerDict is table and "one that a library makes" in table
    assert {name: table[name] for name in before} == before


def test_a_table_of_a_library_that_the_user_holds_is_not_put_back() -> None:
    holder = types.SimpleNamespace(levels=logging._levelToName, own={})
    with preserved({"root": holder}) as state:
        logging._levelToName[12345] = holder.own[12345] = "a new one"
        assert state.changed
    assert logging._levelToName.pop(12345) == "a new one" and holder.own == {}


def in_closure(table: Any) -> Any:
    return lambda: table


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda table: types.SimpleNamespace(table=table),
    "closure": in_closure,
    "list": lambda table: [table],
    "dict": lambda table: {"table": table},
    "deep": lambda table: types.SimpleNamespace(rows=[{"table": in_closure(table)}]),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_a_container_of_one_holder_is_put_back_without_a_search(
    hold: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search through all loaded modules takes longer than an epoch of a small network."""
    searched: list[Any] = []
    monkeypatch.setattr(preserve, "in_library_tables", lambda values: set(searched.extend(values) or ()))
    for kind, add in ((list, "append"), (dict, "setdefault"), (set, "add")):
        holder = hold(kind())
        with preserved({"root": holder}) as state:
            (found,) = [p.owner for p in state.places if type(p.owner) is kind and not p.owner]
            getattr(found, add)(7)
            del found
            assert state.changed
        assert not state.changed
        assert not searched


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_a_table_of_a_library_is_not_put_back_wherever_the_user_holds_it(hold: Callable[[Any], Any]) -> None:
    with preserved({"root": hold(logging._levelToName)}) as state:
        logging._levelToName[12345] = "a new one"
        assert state.changed
    assert logging._levelToName.pop(12345, None) == "a new one"


def test_whose_code_it_is() -> None:
    assert is_library_module("torch.nn") and is_library_module("logging") and is_library_module("sys")
    assert is_library_module("pytest", pytest.__file__) and is_library_class(OrderedDict)
    assert not is_library_module("__main__") and not is_library_module(__name__, __file__)
    assert not is_library_class(Config) and not is_library_function(reads_global)
    assert is_library_function(functools.wraps(reads_global)(torch.no_grad()(reads_global)))  # type: ignore[arg-type]
    assert not is_library_module("a_notebook_without_a_file") and sys.modules.get("a_notebook_without_a_file") is None


def test_paths_are_the_same_for_the_same_structure_built_again() -> None:
    def build() -> Any:
        return closure_of({"a": [1, {"b": Slotted()}], "model": Attributed()})

    one, two = ([place.path for place in PythonState({"step": build()}).places] for _ in range(2))
    assert one == two and ("step", "<value>", "['a']", "[1]", "['b']") in one


def test_paths_tell_all_places_apart() -> None:
    class Own(OrderedDict[str, Any]):
        pass

    class Both(Slotted):
        def __next__(self) -> int:
            return 0

        def __iter__(self) -> Iterator[int]:
            return self

    own, both, model = Own(a=Slotted()), Both(), nn.Sequential(Attributed(), nn.LSTM(2, 2))
    own.beta, both.gamma = 0.0, 0.0  # type: ignore[attr-defined]
    state = PythonState({"step": closure_of([1]), "model": model, "own": own, "both": both}, skip=model)
    paths = [place.path for place in state.places]
    assert len(set(paths)) == len(paths)


def test_a_vocabulary_is_not_compared_item_by_item(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, words = {f"word {i}": i + 1000 for i in range(100)}, [f"word {i}" for i in range(100)]

    def encode() -> Any:
        return vocabulary, words

    state, compared = PythonState({"step": encode}), []
    same_value = places.same_value
    monkeypatch.setattr(places, "same_value", lambda a, b: compared.append(a) or same_value(a, b))
    monkeypatch.setattr(places, "equal_value", lambda a, b: compared.append(a) or a == b)
    assert not state.changed
    state.restore()
    assert len(compared) < 20
    vocabulary["word 3"] = 0
    words[3] = ""
    assert state.changed
    state.restore()
    assert vocabulary["word 3"] == 1003 and words[3] == "word 3"
