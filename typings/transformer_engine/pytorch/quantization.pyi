from typing import Any

from torch import Tensor
from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch import DType, Quantizer

class DelayedScalingRecipeState:
    scale: Tensor
    amax_history: Tensor
    def make_quantizers(self) -> list[Quantizer]: ...

class _State:
    fp8_enabled: bool
    fp8_calibration: bool
    fp8_recipe: Recipe | None
    fp8_distributed_group: Any
    is_first_fp8_module: bool
    autocast_depth: int
    global_amax_buffer: dict[str, list[Tensor]]
    global_amax_history_buffer: dict[str, list[Tensor]]
    global_scale_buffer: dict[str, list[Tensor]]

class FP8GlobalStateManager:
    quantization_state: _State
    @classmethod
    def is_fp8_enabled(cls) -> bool: ...
    @classmethod
    def is_fp8_calibration(cls) -> bool: ...
    @classmethod
    def is_first_fp8_module(cls) -> bool: ...
    @classmethod
    def get_fp8_recipe(cls) -> Recipe: ...
    @classmethod
    def get_autocast_state(cls) -> Any: ...
    @classmethod
    def set_autocast_state(cls, state: Any) -> None: ...
    @classmethod
    def get_buffer_info(cls) -> str: ...
    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None: ...
    @classmethod
    def reset(cls) -> None: ...

def get_align_size_for_quantization(recipe: Recipe) -> int: ...
def get_fp8_te_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> DType: ...
