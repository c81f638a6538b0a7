"""Faults of vLLM 0.32 that keep a model from being compared, mended in its process while a context lasts.

None of them is in what te-models writes: tests/serving/test_vllm.py shows two of them on folders of transformers.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor

Mend = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def rope_of_latents() -> Iterator[None]:
    """Rotate in PyTorch. On a CPU the operator takes queries [S, heads, D] for one head, and views for whole rows.

    Of the models here only latent attention gives it such; under YaRN it does not use the operator.
    """
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    def rotate(
        self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return self.forward_static(
            positions,
            query,
            key,
            head_size=self.head_size,
            rotary_dim=self.rotary_dim,
            cos_sin_cache=self._match_cos_sin_cache_dtype(query),
            is_neox_style=self.is_neox_style,
        )

    # Modules with the method of before are kept for the next model.
    rotary_embedding._ROPE_DICT.clear()
    with mock.patch.object(RotaryEmbedding, "forward_cpu", rotate):
        yield
    rotary_embedding._ROPE_DICT.clear()


@contextlib.contextmanager
def sigmoid_router() -> Iterator[None]:
    """Choose by sigmoid scores as among one group. On a CPU the router has them for groups only, and asserts."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    compute = CPURouter._compute_routing

    def routed(self: CPURouter, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.scoring_func == "sigmoid" and not self.use_grouped_topk:
            self.use_grouped_topk = True
            self.num_expert_group = self.topk_group = 1
        return compute(self, *args, **kwargs)

    with mock.patch.object(CPURouter, "_compute_routing", routed):
        yield


@contextlib.contextmanager
def bias_of_laguna() -> Iterator[None]:
    """Load e_score_correction_bias, which its loader leaves out without a word: the parameter has another name."""
    from vllm.model_executor.models.laguna import LagunaModel

    load = LagunaModel.load_weights

    def loaded(self: LagunaModel, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        given = list(weights)
        names = load(self, given)
        parameters = dict(self.named_parameters())
        for name, tensor in given:
            if name.endswith(".experts.e_score_correction_bias"):
                own = name.replace(".experts.", ".experts.routed_experts.")
                parameters[own].data.copy_(tensor)
        return names

    with mock.patch.object(LagunaModel, "load_weights", loaded):
        yield


@contextlib.contextmanager
def qwen3_5_without_torchvision() -> Iterator[None]:
    """Register Qwen3.5's text models, whose file imports image processing, and with it torchvision."""
    from vllm import ModelRegistry

    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.io")
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        spec = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = mock.MagicMock(__spec__=spec, __path__=[], __version__="0")
    try:
        models = importlib.import_module("vllm.model_executor.models.qwen3_5")
    finally:
        for name in missing:
            del sys.modules[name]
    for name in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"):
        ModelRegistry.register_model(name, getattr(models, name))
    yield
