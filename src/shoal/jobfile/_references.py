"""What a field names: something known, or an import path "module:name" or "file.py:name"; and its arguments."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.errors import describe
from shoal.jobfile._tree import Node, Problems, did_you_mean, kind_of

WORDS = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
TYPED = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}


MISSING = object()


class Mistake(Exception):
    """What is wrong with one reference, and on which line."""

    def __init__(self, line: int | Node, text: str) -> None:
        self.line = line.line if isinstance(line, Node) else line
        super().__init__(text)


class noted(contextlib.AbstractContextManager[None, bool]):  # it reads as a verb
    """Mistakes in the block are noted, and reading continues after it."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Mistake):
            return False
        self.problems.add(error.line, str(error))
        return True


def split(field: str, node: Node) -> tuple[Node, dict[str, Node]]:
    """The `use` of a reference, and its arguments."""
    if not node.is_table:
        raise Mistake(node, f"{field} is {node.shown()}; use a name, an import path, or a table with `use`")
    arguments = dict(node.value)
    use = arguments.pop("use", None)
    if use is None:
        known = ", ".join(arguments) or "nothing"
        raise Mistake(node, f"{field} has {known} but no `use`, which says what it is: add use = ...")
    if not isinstance(use.value, str) or not use.value.strip():
        raise Mistake(use, f"{field} is {use.shown()}; use a name or an import path, as text")
    return use, arguments


def find(field: str, use: Node, known: Mapping[str, Any], folder: Path) -> Any:
    """The object that a text names."""
    text = str(use.value)
    if text in known:
        return known[text]
    lower = {name.lower(): name for name in known}
    if text.lower() in lower:
        return known[lower[text.lower()]]
    if ":" in text:
        return imported(field, use, folder)
    kinds = "an import path: 'file.py:name' or 'module:name'"
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", text) and not text.endswith(".py"):
        module, _, name = text.rpartition(".")
        raise Mistake(use, f"{field} {text!r} is not known; an import path has a colon: {f'{module}:{name}'!r}")
    hint = did_you_mean(text, known)
    more = f"; or give {kinds}" if "did you mean" not in hint else ""
    raise Mistake(use, f"{field} {text!r} is not known{hint}{more}" if known else f"{field} is {text!r}; give {kinds}")


def imported(field: str, use: Node, folder: Path) -> Any:
    """What an import path leads to; whatever its module does wrong is the reference's mistake."""
    where, _, name = str(use.value).rpartition(":")
    where, name = where.strip(), name.strip()
    if not where or not all(part.isidentifier() for part in name.split(".")):
        raise Mistake(use, f"{field} is {use.value!r}; an import path is 'module:name' or 'file.py:name'")
    module = guarded(use, f"{field}: importing {where!r}", lambda: _module(field, use, where, folder))
    value: Any = module
    for part in name.split("."):
        inner = guarded(use, f"{field}: taking {name!r} from {where!r}", partial(getattr, value, part, MISSING))
        if inner is MISSING:
            near = get_close_matches(part, [n for n in dir(value) if not n.startswith("_")], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; check the name"
            raise Mistake(use, f"{field}: {where!r} has no {name!r}{hint}")
        value = inner
    return value


def guarded(line: int | Node, what: str, call: Callable[[], Any]) -> Any:
    """Run code of the user's. Its errors, and its attempts to leave, are one line; what it prints goes to stderr."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return call()
    except (Mistake, KeyboardInterrupt):
        raise
    except SystemExit as left:
        raise Mistake(line, f"{what} left the program (SystemExit: {left.code}); remove that call") from None
    except RecursionError:
        raise Mistake(line, f"{what} raised RecursionError; it calls itself without an end") from None
    except BaseException as error:
        place = _place(error)
        raise Mistake(line, f"{what} raised {describe(error)}{place}") from error


def _place(error: BaseException) -> str:
    """Where in the user's own code it was raised."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({Path(error.filename).name}:{error.lineno})"
    trace, last = error.__traceback__, ""
    here = Path(__file__).parent
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if here not in file.parents and "importlib" not in str(file) and "site-packages" not in file.parts:
            last = f" ({file.name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return last


def _module(field: str, use: Node, where: str, folder: Path) -> ModuleType:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # as python itself does for a script
    if where.endswith(".py"):
        return _file(field, use, folder / where)
    if not all(part.isidentifier() for part in where.split(".")):
        raise Mistake(use, f"{field}: {where!r} is no module's name; an import path is 'module:name' or 'file.py:name'")
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(error.name + ".")):
            raise Mistake(use, f"{field}: no module {where!r} beside the file or installed; check the name") from None
        raise


def _file(field: str, use: Node, path: Path) -> ModuleType:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise Mistake(use, f"{field}: the file {str(path)!r} {what}; paths are taken from the job file's folder")
    path = path.resolve()
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    if known is not None or name in sys.stdlib_module_names or not name.isidentifier():
        name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        if name in sys.modules:
            return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # classes in the file must be importable by name where they are pickled
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def check_arguments(
    field: str, use: Node, function: Any, arguments: Mapping[str, Node], given: int = 0, *, typed: bool = False
) -> None:
    """Whether `function` can be called with `given` values and these arguments; `typed`: annotations hold too."""
    called = use.value
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return
    parameters = list(signature.parameters.values())
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    first = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:given]
    free = any(p.kind is p.VAR_KEYWORD for p in parameters)
    open_names = [name for name in names if name not in first]
    for name, node in arguments.items():
        if name in first or (name not in names and not free):
            hint = did_you_mean(name, open_names) if open_names else "; it takes none"
            raise Mistake(node, f"{field} {called!r} has no argument {name!r}{hint}")
        if typed:
            _check_type(f"{field}.{name}", node, str(signature.parameters[name].annotation))
    try:
        signature.bind(*[None] * given, **dict.fromkeys(arguments))
    except TypeError as error:
        raise Mistake(
            use, f"{field} {called!r} cannot be called so: {error}; give it in the table of {field}"
        ) from None


def _check_type(label: str, node: Node, annotation: str) -> None:
    words = [word.strip() for word in annotation.split("|")]
    if not all(word in WORDS or word == "None" for word in words):
        return
    if node.value is None and "None" in words:
        return
    kinds = {kind for word in words if word in WORDS for kind in WORDS[word]}
    if type(node.value) not in kinds:
        wanted = " or ".join(TYPED[word] for word in words if word in TYPED)
        raise Mistake(node, f"{label} is {node.shown()} ({kind_of(node.value)}); use {wanted}")


def bound(function: Callable[..., Any], arguments: Mapping[str, Node]) -> Callable[..., Any]:
    """The function with its arguments filled in, and a name that shows them."""
    if not arguments:
        return function
    plain = {name: node.plain() for name, node in arguments.items()}
    made = partial(function, **plain)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    arguments_text = ", ".join(f"{key}={value!r}" for key, value in plain.items())
    made.__qualname__ = f"{name}({arguments_text})"  # type: ignore[attr-defined]  # a run folder tells jobs apart by it
    return made
