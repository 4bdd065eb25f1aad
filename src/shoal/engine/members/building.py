"""Build members from jobs: each network under its job's own seed, in its own memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import nn

from shoal.data import Pool
from shoal.engine.members.member import Member, open_data, seeded
from shoal.engine.members.optimizers import note_lazy_groups
from shoal.engine.members.ownership import call_factory, copied, gives_out_shared, overlapping, spans
from shoal.errors import JobError, describe, describe_with_place
from shoal.jobs.job import Job

QUANTIZED = (torch.quint8, torch.qint8, torch.qint32)
"""Quantized dtypes whose tensors torch can copy."""


def build_member(job: Job, index: int, name: str, pool: Pool) -> Member:
    """Build one member. Its network may share memory with others, see `give_own_networks`."""
    model, rng = build_network(job, pool.device)
    orders = torch.Generator().manual_seed(job.order_seed)
    data = open_data(pool, job, "data")
    val = open_data(pool, job, "val") if job.val is not None else None
    return Member(job, index, name, pool.device, model, rng, orders, data, val)


def build_network(job: Job, device: torch.device, private: bool = False) -> tuple[nn.Module, torch.Generator]:
    """Build a network under the job's seed, and return it with a generator in the resulting state.

    It seeds the modules `random` and `numpy.random`, which the caller must restore.

    Args:
        private: Copy the network.
    """
    rng = torch.Generator()
    with seeded(job.seed, device, put_back=False):
        try:
            model = call_factory(job)
            model = copied(model) if private else model
        except JobError:
            raise
        except Exception as error:
            raise JobError(
                f"building the model raised {describe_with_place(error)}; call job.model() by itself to see where"
            ) from error
        rng.set_state(torch.get_rng_state())
    empty = next((name for name, tensor in model.named_parameters() if tensor.is_meta), None)
    if empty is not None:
        raise JobError(f"its parameter {empty} is on the meta device, without numbers; build the network on the CPU")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not _has_operators(tensor.dtype):
            raise JobError(
                f"{name} has dtype {tensor.dtype}, for which torch has no operators; use torch.uint8 for bits"
            )
    note_lazy_groups(job, model)
    return model, rng


@cache
def _has_operators(dtype: torch.dtype) -> bool:
    """Return whether torch can copy and convert numbers of a dtype, which it cannot for torch.int4 and torch.bits8."""
    if dtype in QUANTIZED:
        return True
    try:
        torch.empty(1, dtype=dtype).to(torch.complex128)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def give_own_networks(members: Sequence[Member]) -> list[str]:
    """Give each member its own copy if networks share memory, with each other or with what their factories keep.

    The copies are taken right after a new call of the factory, and all networks are put in train mode. Returns a line
    for each job for which this failed.
    """
    sharing = overlapping([spans(member.model) for member in members])
    lines: list[str] = []
    for place, member in enumerate(members):
        try:
            if place in sharing or gives_out_shared(member.job, member.model):
                member.model, member.rng = build_network(member.job, member.device, private=True)
            member.enter_train_mode()
        except JobError as error:
            lines += [f"job {member.name!r}: {line}" for line in error.lines]
        except Exception as error:
            lines.append(f"job {member.name!r}: model.train() raised {describe(error)}")
    return lines


def names(jobs: Sequence[Job]) -> list[str]:
    """Return the names of the jobs; a job without a name is named by its index."""
    return [job.name or f"job-{index}" for index, job in enumerate(jobs)]
