"""Other projects' formats: Hugging Face model folders and Transformer Engine checkpoints.

`remote_code` holds the code that goes into a folder for transformers. It must not import te_models.

Not here: this project's own saved state (te_models.saving).
"""
