"""The code of a group's kernel, from which a kernel for one or for several groups with this code is written."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.engine.kernels import parts

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
