"""The state of a stack on its device: weights, buffers, optimizer state and hyper-parameters, members first."""
