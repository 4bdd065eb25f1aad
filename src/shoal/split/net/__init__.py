"""A split over machines: a coordinator that holds the network, and workers that join, train, stall, die and return.

    wire             a task or an outcome as a message, and back
    codec            fewer bits for each number
    job_description  what both sides must agree on
    coordinator, worker
    launch           a coordinator with workers that are forked here
    run              one process of a run, as the command line or torchrun says
    advice           whether the split saves time

Links, messages and how workers join are in `shoal.net`.
"""
