"""Placed training: a server and workers that train one network together.

    channel    a link with threads that send and receive, so that traffic and compute overlap
    group      what workers do among themselves (torch.distributed): all-reduce, gather, sharded updates
    joined_batch  dropout and batch norm over rows that are in several places
    front      the layers that a worker computes
    back       the layers that the server computes, with the loss
    worker     a worker process
    members    the workers that a server has: who joins, who is lost
    joining    what workers are given when they join, and what they give back for a checkpoint
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

Why TCP between server and workers, and torch.distributed only among workers: a collective over all processes fails for
everybody when one of them dies, and cannot be repeated with the others. A link fails alone, with a deadline, and what
it carried is computed again by those that are left. Groups of workers (gloo, NCCL) are made anew when one is lost.
"""
