"""Adapters of peft on the fused weights of a model, the same for a CausalLM and a TEModelsForCausalLM.

Lives here: the linears and parameters of transformers as rows of our weights, LoRA's layers on them, and their merges.
Not here: which modules an adapter names, and its files (te_models.training.lora), and the other methods of peft.
"""
