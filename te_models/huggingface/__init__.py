"""te-models inside Hugging Face's programs: a PreTrainedModel around CausalLM, its config, caches and saved folders.

Not here: reading and writing checkpoints of Hugging Face's own models (te_models.interop).
"""
