"""Types of the part of Transformer Engine 2.20 that te_models.engine.native uses, for checks where it is not installed.

`Any` stands where Transformer Engine's own source has no type and te-models relies on none.
"""
