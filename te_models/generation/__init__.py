"""Text from a model: options, sampling, the decode loop over a KV cache, streaming of text, and
an HTTP server with OpenAI's API.

Not here: the cache itself and the forward pass (te_models.model), chat templates and tokenizers (te_models.data).
"""
