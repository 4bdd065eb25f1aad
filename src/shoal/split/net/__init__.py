"""A split over machines: a coordinator that holds the network, and workers that join, train, stall, die and return.

    messages   what travels: a header, numbers, the bytes of tensors
    wire       a task or an outcome as a message, and back
    codec      fewer bits for each number
    links      one TCP connection: how it is made, what it carries, how fast it is
    handshake  whether both processes mean the same job
    deadline   how long a worker may take
    coordinator, worker, launch, run

Every worker is connected to the coordinator alone: a collective over all workers would hang when one of them dies,
while a lost connection affects only its own worker.
"""
