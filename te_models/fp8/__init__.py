"""The FP8 state of a model: scales and amax histories, FP8 primary weights, and their all-gather under FSDP2.

Not here: quantizers and GEMMs (te_models.engine) and recipes as data (te_models.config).
"""
