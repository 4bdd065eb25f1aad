"""Packages that have the name of a function, can be called like it, and load their names when they are used."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """A package such as `shoal.tune`. It sets `_HOME`, the module of each of its names, and `_FUNCTION`, that of the
    function."""

    def __getattr__(self, name: str) -> Any:
        modules: dict[str, str] = self.__dict__["_HOME"]
        if name not in modules:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return self._function()(*args, **settings)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function())

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """What `help` shows: the package, the call and its arguments."""
        function = self._function()
        arguments = inspect.signature(function).parameters.values()
        call = inspect.Signature([argument.replace(annotation=inspect.Parameter.empty) for argument in arguments])
        return f"{self.__dict__['__doc__']}\n{self.__name__}{call}\n\n{inspect.getdoc(function)}\n"

    def _function(self) -> Callable[..., Any]:
        """Return the function that has the package's name."""
        name = self.__name__.rpartition(".")[2]
        function: Callable[..., Any] = getattr(import_module(self.__dict__["_FUNCTION"]), name)
        return function
