"""The training loop and its surroundings: fine-tuning, many processes, CUDA graphs, metrics, reports, LoRA.

Not here: optimizers (te_models.optim), datasets (te_models.data) and saved state (te_models.checkpoint).
"""
