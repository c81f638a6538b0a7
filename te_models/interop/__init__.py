"""Other projects' formats: Hugging Face model folders and Transformer Engine checkpoints.

Not here: this project's own saved state (te_models.checkpoint).
"""
