"""Processes that work together over TCP: the coordinator of a split or the server of a placement, and its workers.

    messages       what travels: a header, numbers, the bytes of tensors
    links          one TCP connection: how it is made, what it carries
    link_speed     how fast a link is
    channel        a link with threads that send and receive while the process computes
    joining        how workers join a run, and join again after a lost link
    handshake      whether two processes have the same job
    deadline       how long a worker may take
    local_workers  forked worker processes on this machine
    torchrun       what torchrun says of a process

Every worker has one link, to the coordinator or server: a collective over all processes would hang when one of them
dies, while a lost link affects only its own worker.
"""
