"""Optimizers with a column of hyper-parameters per member, and what belongs to a step: schedules, clipping, loss
scaling.

Rules exist for SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, RMSprop, Adadelta, ASGD and Rprop, with all their
settings but `differentiable`. `foreach`, `fused` and `capturable` say how torch launches its kernels, not what they
compute, so rules accept and ignore them. The optimizer objects of any other class run one member at a time.
"""
