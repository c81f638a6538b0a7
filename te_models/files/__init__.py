"""Atomic writes of files and folders, and strict readers and writers of JSON and safetensors.

Not here: the contents of a checkpoint (te_models.saving) and other projects' formats (te_models.interop).
"""
