"""Collectives, control messages between ranks, and access to the local shard of a DTensor.

Not here: parallelizing a model (te_models.training.parallel, te_models.model.tensor_parallel, expert_parallel).
"""
