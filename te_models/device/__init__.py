"""Differences between devices and their libraries: the choice of cuDNN, CUDA graph capture, BF16 products on CPUs.

Not here: operations of the model (te_models.kernels, te_models.engine).
"""
