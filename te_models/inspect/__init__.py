"""Measurements of running models: FP8 verification, benchmarks against peers, roofline.

Not here: estimates that need no model (te_models.planning).
"""
