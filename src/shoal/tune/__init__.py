"""Search for the best settings of a training: samplers propose, schedulers decide who trains on, the engine packs."""
