"""From files to batches: formats of records, chat templates, tokenizers, packing and streaming.

Not here: the training loop that consumes the batches (te_models.training).
"""
