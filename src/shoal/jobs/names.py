"""Look up things by the name of their job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from shoal.errors import NoSuchJob

_Named = TypeVar("_Named", bound="HasName")


class HasName(Protocol):
    """A result, a member, or anything else that has the name of its job."""

    @property
    def name(self) -> str: ...


def named(things: Iterable[_Named], name: str) -> _Named:
    """Return the thing of this name, or raise NoSuchJob."""
    names = []
    for each in things:
        if each.name == name:
            return each
        names.append(repr(each.name))
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    raise NoSuchJob(f"no job {name!r} in this run; it has {', '.join(names[:10])}{more}")
