"""Join groups with the same code in one launch, in an order of the steps that keeps every dependency.

A group moves to an earlier launch if that does not need more memory, such as the casts of all weights at the start of a
step; or to a later one, such as the casts of all gradients at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from shoal.engine.kernels import parts
from shoal.engine.tiers.captured.fusion.grouping import Group
from shoal.engine.tiers.captured.fusion.recording import Call

LARGE = 8 << 20
"""The bytes from which what a group writes or reads is not moved away from the call beside it: it would leave the cache
meanwhile, which takes longer than a launch."""

_KERNEL = """extern "C" __global__ void {name}({parameters}) {{
  {selection}
  for (unsigned base = (block * blockDim.x + threadIdx.x) * {wide}u; base < (unsigned)n;
       base += blocks * blockDim.x * {wide}u) {{
    {setup}
    #pragma unroll
    for (unsigned j = 0; j < {wide}u; ++j) {{
      const unsigned i = base + j;
      {body}
    }}
    {end}
  }}
}}
"""


@dataclass(slots=True, frozen=True)
class Code:
    """A loop over all elements, `wide` at a time."""

    pointers: tuple[tuple[str, str], ...]
    """Type and name of each operand and result."""
    wide: int
    setup: tuple[str, ...]
    """Statements for `wide` elements, before `body`."""
    body: tuple[str, ...]
    """Statements for one element."""
    end: tuple[str, ...]

    @property
    def most_parts(self) -> int:
        """The most groups of one launch."""
        return parts.most_parts(len(self.pointers))

    def written(self, name: str, places: int) -> str:
        """Return the source of a kernel with room for so many groups."""
        return _KERNEL.format(
            name=name, wide=self.wide, parameters=", ".join(parts.parameters(self.pointers, places)),
            selection=parts.selection(self.pointers, places),
            setup="\n    ".join(self.setup), body="\n      ".join(self.body), end="\n    ".join(self.end),
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class Launch:
    """Groups that are computed by one kernel at the same time, since none depends on another."""

    groups: list[Group]


@dataclass(slots=True)
class Size:
    """The bytes that a group reads and writes."""

    read: int
    written: int


@dataclass(slots=True)
class Plan:
    """Steps in the order in which they run, while groups are moved."""

    steps: Sequence[Call | Group]
    before: Callable[[Call | Group], Iterable[Call | Group]]
    """A function that returns the steps that must be done before a step."""
    codes: Callable[[Group], Code]
    sizes: Callable[[Group], Size]
    entries: list[Call | Launch] = field(default_factory=list)
    place: dict[Call | Group, int] = field(default_factory=dict)
    """The index of each step's entry."""

    def joined(self) -> list[Call | Launch]:
        """Return the steps with groups of the same code joined."""
        self._move_up()
        self._move_down()
        return [entry for entry in self.entries if not isinstance(entry, Launch) or entry.groups]

    def _move_up(self) -> None:
        """Add each step to the end, or to an earlier launch of the same code."""
        launches: dict[Code, list[int]] = {}
        last_call = -1
        for step in self.steps:
            if isinstance(step, Call):
                self.place[step] = len(self.entries)
                last_call = last_call if step.is_view else self.place[step]
                self.entries.append(step)
                continue
            size, others = self.sizes(step), launches.setdefault(self.codes(step), [])
            first = 1 + max((self.place[other] for other in self.before(step)), default=-1)
            if size.written > min(size.read, LARGE):
                first = max(first, last_call)
            at = next((at for at in others if at >= first and self._has_room(at)), None)
            if at is None:
                at = len(self.entries)
                others.append(at)
                self.entries.append(Launch([]))
            self._put(step, at)

    def _move_down(self) -> None:
        """Move groups to a later launch of the same code, beginning with the last."""
        launches: dict[Code, list[int]] = {}
        next_call = len(self.entries)
        latest: dict[Call | Group, int] = {}
        for at in range(len(self.entries) - 1, -1, -1):
            entry = self.entries[at]
            if isinstance(entry, Call):
                next_call = next_call if entry.is_view else at
                self._note(entry, at, latest)
                continue
            for group in list(entry.groups):
                size, others = self.sizes(group), launches.setdefault(self.codes(group), [])
                last = latest.get(group, len(self.entries)) - 1
                if size.read > min(size.written, LARGE):
                    last = min(last, next_call)
                later = next((place for place in others if at < place <= last and self._has_room(place)), at)
                if later != at:
                    entry.groups.remove(group)
                    self._put(group, later)
                self._note(group, later, latest)
            if entry.groups:
                launches[self.codes(entry.groups[0])].append(at)

    def _note(self, step: Call | Group, at: int, latest: dict[Call | Group, int]) -> None:
        """Note that what a step needs must be done before `at`."""
        for other in self.before(step):
            latest[other] = min(latest.get(other, at), at)

    def _put(self, group: Group, at: int) -> None:
        launch = self.entries[at]
        assert isinstance(launch, Launch)
        launch.groups.append(group)
        self.place[group] = at

    def _has_room(self, at: int) -> bool:
        launch = self.entries[at]
        assert isinstance(launch, Launch)
        return len(launch.groups) < self.codes(launch.groups[0]).most_parts
