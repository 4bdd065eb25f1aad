"""Optimizers with a column of hyper-parameters per member, and what goes with a step: schedule, clip, loss scale.

Rules exist for SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, RMSprop, Adadelta, ASGD and Rprop, with all their
settings but `differentiable`. `foreach`, `fused` and `capturable` say how torch launches its kernels, not what they
compute: a rule accepts and ignores them. Any other class runs as itself, one member at a time.
"""
