"""Saved state: model folders, the numbered checkpoints of a run, and sharded saves by many processes.

Not here: activation recompute (te_models.model.recompute) and file primitives (te_models.files).
"""
