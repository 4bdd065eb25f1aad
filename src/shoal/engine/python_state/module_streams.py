"""Give each job its own random state of the modules `random` and `numpy.random`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from shoal.engine.python_state._state_codec import Decoder, Encoder, Plain
from shoal.utils.random_state import NUMPY, PYTHON, Generator, get_state, restored, seed_modules, set_state

_GENERATORS: tuple[Generator, ...] = (PYTHON, NUMPY)


class ModuleStreams:
    """One job's random streams, which start as after `random.seed(seed)` and `numpy.random.seed(seed)`."""

    def __init__(self) -> None:
        self.used = False
        """Whether the job's step may draw from them. If not, swapping them in, which is slow, is skipped."""
        self.states: list[Any] | None = None
        """The current states of the generators; None at their start."""

    @contextmanager
    def swapped_in(self, seed: int, keep: bool) -> Iterator[None]:
        """Let the modules draw from this job's streams inside this context. With `keep`, they stay advanced."""
        if not self.used:
            yield
            return
        before = self.states
        with restored(_GENERATORS):
            if self.states is None:
                seed_modules(seed)
            else:
                for generator, state in zip(_GENERATORS, self.states, strict=True):
                    set_state(generator, state)
            try:
                yield
            finally:
                self.states = [get_state(generator) for generator in _GENERATORS] if keep else before

    def saved(self) -> dict[str, Plain] | None:
        """Return the current states as plain data and tensors; None at their start."""
        if self.states is None:
            return None
        encoder = Encoder({})
        return {"states": [encoder.value(state) for state in self.states], "nodes": encoder.nodes}

    def load(self, saved: Mapping[str, Plain] | None) -> None:
        """Restore the states that `saved()` returned."""
        if saved is None:
            self.states = None
        else:
            decoder = Decoder(saved["nodes"], {}, torch.device("cpu"))
            self.states = [decoder.value(state) for state in saved["states"]]
