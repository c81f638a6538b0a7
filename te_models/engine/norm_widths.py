"""The widths for which Transformer Engine has RMSNorm kernels of their own; general kernels take all others."""

TUNED = (512, 768, 1024, 2048, 4096, 8192)
