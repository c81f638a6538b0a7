"""From documents to batches: tokenizers, chat templates, packing, corpus chunks and streaming.

Not here: the training loop that consumes the batches (te_models.training).
"""
