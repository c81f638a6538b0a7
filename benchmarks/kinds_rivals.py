"""Transformers' models as the rivals of kinds_speed.py, and the measurement of a step of anybody's."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from te_models.config.model import ModelConfig
from te_models.interop.hf_families import family_for

WARM_UP, TIMED = 5, 7
# Called between the warm-up and the steps that count; one of several processes waits there.
WAIT_FOR_TURN: ContextVar[Callable[[], None]] = ContextVar("wait_for_turn", default=lambda: None)


def tokens(config: ModelConfig, batch: int, seq: int, device: torch.device) -> Tensor:
    """Return random ids [batch, seq]."""
    made = torch.Generator().manual_seed(0)
    return torch.randint(0, config.vocab_size, (batch, seq), generator=made).to(device)


def measured(step: Callable[[], Any], device: torch.device, before: int) -> dict[str, Any]:
    """Return the median milliseconds of a step, and the peak of memory above `before`, capture included.

    Of the first step it is not: libraries that try their kernels then allocate buffers of their own.
    """
    if device.type == "cuda":
        step()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP if device.type == "cuda" else 1):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    WAIT_FOR_TURN.get()()
    if device.type == "cpu":
        started = time.perf_counter()
        step()
        return {"ms": 1e3 * (time.perf_counter() - started)}
    times = []
    for _ in range(TIMED):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return {"ms": statistics.median(times), "all_ms": times, "peak_gib": (peak() - before) / 2**30}


def peak() -> int:
    """Return the most bytes that were allocated on the GPU since the counter was reset."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def held() -> int:
    """Return the bytes that are allocated on the GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def their_model(config: ModelConfig, device: torch.device) -> Any:
    """Return transformers' model of this shape with random weights, in BF16."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    family = family_for(config)
    fields = {key: value for key, value in family.write(config).items() if key != "architectures"}
    made = CONFIG_MAPPING[family.model_type](**fields, dtype="bfloat16")
    experts = {} if config.moe is None else dict(experts_implementation="grouped_mm")
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            made, dtype=torch.bfloat16, attn_implementation="sdpa", **experts
        )


def theirs(config: ModelConfig, batch: int, seq: int, device: torch.device) -> dict[str, Any]:
    """Measure transformers, compiled, or layer by layer where 24 layers at once take more than six minutes.

    Where PyTorch cannot compile a state space (2.11 fails at its cumulative sums), everything around it is compiled,
    and it runs as it is, on the packages that transformers uses. So does Kimi Delta Attention, whose kernels PyTorch's
    compiler would tune again, for longer than three minutes; they run in the configurations that were fastest for ours.
    """
    before = held()
    model = their_model(config, device).train()
    model.config.use_cache = False
    few = config.num_hidden_layers <= 4
    tuned = {} if device.type == "cpu" else leave_out(model, is_delta_attention)
    if tuned:
        importlib.import_module("fla.ops.kda")
        fix_configurations = importlib.import_module(
            "te_models.kernels.delta_rule_triton"
        ).fix_configurations
        fix_configurations()
    for part in [] if device.type == "cpu" else [model] if few else model.model.layers:
        part.compile()
    ids = tokens(config, batch, seq, device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    try:
        step()
    except Exception as error:
        mixers = leave_out_mixers(model)
        if not mixers:
            raise
        torch.compiler.reset()
        model.zero_grad()
        return measured(step, device, before) | dict(
            not_compiled=mixers, because=f"{type(error).__name__}: {error}"[:300]
        )
    found = measured(step, device, before)
    return found | (dict(not_compiled=tuned) if tuned else {})


def is_delta_attention(module: nn.Module) -> bool:
    """Return whether it is transformers' module of a Kimi Delta Attention."""
    return type(module).__name__.endswith("LinearDeltaAttention")


def leave_out(model: Any, chosen: Callable[[nn.Module], bool]) -> dict[str, str]:
    """Keep the chosen modules from being compiled; return what computes them, by the names of their classes."""
    classes = {type(module) for module in model.modules() if chosen(module)}
    for cls in classes:
        cls.forward = torch.compiler.disable(cls.forward)
    return {cls.__name__: "the packages that transformers uses" for cls in classes}


def is_state_space(module: nn.Module) -> bool:
    """Return whether it is transformers' module of a Mamba 2 layer, which FalconH1 calls a mixer."""
    name = type(module).__name__
    return name.endswith(("MambaLayer", "Mamba2Mixer", "H1Mixer"))


def leave_out_mixers(model: Any) -> dict[str, str]:
    """Keep the state spaces of transformers' model from being compiled; return what computes them.

    transformers takes mamba-ssm's kernels only with the package causal-conv1d beside them, which has to be compiled for
    each GPU; flash-linear-attention's convolution takes its place here.
    """
    found = leave_out(model, is_state_space)
    for cls in {type(module) for module in model.modules() if is_state_space(module)}:
        module = sys.modules[cls.__module__]
        found[cls.__name__] = "plain PyTorch"
        with contextlib.suppress(ImportError):
            from fla.modules.causal_conv1d import causal_conv1d
            from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

            def convolution(
                x: Tensor, weight: Tensor, bias: Tensor, *_: Any, **more: Any
            ) -> Tensor:
                y = causal_conv1d(x.mT.contiguous(), weight, bias, activation=more["activation"])
                return (y[0] if isinstance(y, tuple) else y).mT

            def scan(*given: Any, **more: Any) -> Any:
                known = inspect.signature(mamba_chunk_scan_combined).parameters
                return mamba_chunk_scan_combined(
                    *given, **{name: value for name, value in more.items() if name in known}
                )

            for name in ("mamba2_chunk_scan", "mamba_chunk_scan_combined"):
                if hasattr(module, name):
                    setattr(module, name, scan)
            # Fused with causal-conv1d's convolution: without it transformers goes on with the two below.
            if hasattr(module, "mamba2_split_conv1d_scan_combined"):
                module.mamba2_split_conv1d_scan_combined = lambda *_, **__: None
            if hasattr(module, "causal_conv1d_fn"):
                module.causal_conv1d_fn = convolution
                found[cls.__name__] = "mamba-ssm's scan, flash-linear-attention's convolution"
    return found


def with_torchao(config: ModelConfig, batch: int, seq: int, device: torch.device) -> dict[str, Any]:
    """Measure transformers with torchao's grouped FP8 products for its experts; its other linears stay in BF16."""
    with torchao_experts():
        return theirs(config, batch, seq, device)


@contextlib.contextmanager
def torchao_experts() -> Iterator[None]:
    """Inside, rows of experts are multiplied in FP8 by torchao, whose groups are multiples of 16 rows.

    Ends of groups are rounded down to such multiples: a few rows meet another expert, the work is the same, and torchao
    is spared the padding.
    """
    from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm as grouped
    from transformers.integrations import moe

    def product(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        return grouped(x, weight, offs // 16 * 16, pad_token_groups_for_grouped_mm=False)

    with mock.patch.object(moe, "_grouped_mm", product):
        yield
