"""Models for servers: quantized checkpoints, and the difference that serving makes.

Not here: reading such checkpoints (te_models.interop).
"""
