"""Estimates made without data: parameter counts, memory per training step, precision per layer.

Not here: measurements of a running model (te_models.inspect).
"""
