"""A split over machines: a coordinator that holds the network, and workers that come, work, stall, die and return.

    wire       a task or an outcome as bytes, and back
    codec      fewer bits for each number
    sockets    what really went through this process's TCP connections
    links      one pair of processes, and how a worker finds its coordinator
    handshake  whether both mean the same job
    deadline   how long a worker may take
    coordinator, worker, launch

Every worker shares a process group of two ranks (gloo) with the coordinator, and with nobody else: a collective over
all of them would hang when one of them dies, while a pair costs only itself.
"""
