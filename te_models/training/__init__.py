"""The training loop: fine-tuning, parallelism, CUDA graphs, evaluation, metrics, plots, terminal output, LoRA.

Not here: optimizers (te_models.optim), datasets (te_models.data) and saved state (te_models.saving).
"""
