"""Operations around the GEMMs of te.Linear: plain PyTorch functions, each beside its faster version.

Not here: te.Linear and te.RMSNorm themselves (te_models.engine).
"""
