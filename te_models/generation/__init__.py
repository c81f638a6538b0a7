"""Text generation: sampling, stop conditions, and the decoding loop over a KV cache.

Not here: the KV cache (te_models.model), tokenizers and chat templates (te_models.data).
"""
