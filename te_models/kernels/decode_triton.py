"""The kernels of a step of decoding (decode.py), in Triton."""

from te_models.kernels.decode import DecodeKernels
from te_models.kernels.decode_attention_triton import attention
from te_models.kernels.decode_product_triton import product

TRITON = DecodeKernels(product=product, attention=attention)
