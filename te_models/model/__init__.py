"""The decoder's layers and a forward pass: RoPE, KV cache, recompute, offload, tensor and expert parallelism.

Not here: loading, saving and generation, which te_models.causal_lm adds, and training (te_models.training).
"""
