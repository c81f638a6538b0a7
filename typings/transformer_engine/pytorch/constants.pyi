import torch
from transformer_engine.pytorch import DType

TE_DType: dict[torch.dtype, DType]
