"""The arithmetic of Transformer Engine's casts, below both engines: tensors in, tensors out, on any device.

Lives here: number formats, casts, the rules for scales, blocks, E8M0, NVFP4's packing, quantizers and the quantized
tensors that they make, in plain PyTorch and as Triton kernels with the same bits.
Not here: modules, recipes and the state of FP8 (te_models.engine, te_models.fp8), nor products of quantized matrices
(te_models.engine.emulated.gemm).
"""
