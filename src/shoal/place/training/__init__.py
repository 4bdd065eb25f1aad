"""Placed training: a server and workers that train one network together.

    group      transfers among workers (torch.distributed): all-reduce, gather, sharded updates
    joined_batch  dropout and batch norm over rows that are in several places
    front      the layers that a worker computes
    back       the layers that the server computes, with the loss
    worker     a worker process
    members    the workers of a server: those that join, and those that are lost
    joining    what workers are sent when they join, and what they send back for a checkpoint
    server     one step of all workers
    unit       a placed job as a unit of the engine
    run        the server's loop: turns, checkpoints, the report
    api        `shoal.train(job, placement=...)` and torchrun: processes, run folder, progress, results

A step, with a joined batch of B rows (the job's batch) of which each of N workers has a share:

    server -> worker   rows of its share, and the parameters that the server updated after the last step
    worker -> server   the tensors at the cut, micro-batch by micro-batch
    server -> worker   their gradients; the server has computed its layers and the loss
    worker -> server   gradients of the layers that are synchronised through the server, while the backward pass runs
    worker <-> worker  all-reduce, sharded updates or sufficient factors of the other replicated layers

The server has the optimizer of everything that is not updated by the workers, the run folder and the random stream.

Server and workers use TCP, and only workers use torch.distributed among themselves: a collective over all processes
fails for all of them when one dies, and cannot be repeated with the others. A link fails by itself, with a deadline,
and its work is computed again by the remaining workers. Groups of workers (gloo, NCCL) are made again when one is lost.
"""
