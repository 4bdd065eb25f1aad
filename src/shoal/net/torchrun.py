"""What torchrun says of a process that it has started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import SplitError
from shoal.net.links import Address


@dataclass(frozen=True, slots=True)
class Torchrun:
    """The process information that torchrun provides."""

    rank: int
    world: int
    where: Address
    alone: bool = False
    """Whether it is the only process that torchrun has started on its machine."""

    @staticmethod
    def read(environment: Mapping[str, str] = os.environ) -> Torchrun | None:
        """Read RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or return None if torchrun did not start this process.

        torchrun's own store is at MASTER_PORT, so the coordinator listens at the next port.
        """
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if not all(name in environment for name in names):
            return None
        try:
            rank, world, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        except ValueError:
            raise SplitError("RANK, WORLD_SIZE or MASTER_PORT is not a number; start this with torchrun") from None
        alone = environment.get("LOCAL_WORLD_SIZE") == "1"
        return Torchrun(rank, world, Address(environment["MASTER_ADDR"], port + 1), alone)
