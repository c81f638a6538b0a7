"""Steps of families whose attention or MLP asks for more than Llama's, beside a plain Llama of the same matrices.

    python -m benchmarks.fused_families --out benchmarks/results/fused_families_h200.json     # about 3 minutes

Each is a slice of ten layers of width 2,560 under `bf16` and `delayed`, 2 x 6,144 tokens, a vocabulary of 32,000 and no
BF16 edges, as the CUDA graph of forward and backward that the Trainer runs. Times are medians of CUDA events; the plain
model is timed before and after its family.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from torch import Tensor

from te_models import CausalLM, ModelConfig
from te_models.inspect.environment import environment, require_gpu
from te_models.training.cuda_graph import GraphedStep

COMMON: dict[str, Any] = dict(
    vocab_size=32000, hidden_size=2560, intermediate_size=6912, num_hidden_layers=10, num_attention_heads=20,
    num_key_value_heads=4, head_dim=128, attention_gate="none", max_position_embeddings=8192,
)  # fmt: skip
# Family -> the fields by which it differs, and those that a plain model needs for the same matrices.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen3": (dict(qk_norm=True), {}),
    "Qwen3.5's attention": (
        dict(qk_norm=True, zero_centered_norm=True, partial_rotary_factor=0.25),
        dict(attention_gate="elementwise", num_attention_heads=16, head_dim=256),
    ),
    "Gemma 3": (
        dict(
            qk_norm=True, zero_centered_norm=True, norm_position="both", attention_multiplier=0.0625,
            hidden_act="gelu_pytorch_tanh", embedding_multiplier=50.6,
        ),
        dict(num_attention_heads=8, head_dim=256),
    ),
    "GLM-4": (dict(partial_rotary_factor=0.5, rope_interleaved=True, norm_position="both"), {}),
    "OLMo 2": (dict(qk_norm=True, qk_norm_scope="all_heads", norm_position="post"), {}),
    "Granite": (dict(attention_multiplier=0.0078125, residual_multiplier=0.22), {}),
    "heads of 80": ({}, dict(num_attention_heads=32, num_key_value_heads=8, head_dim=80)),
}  # fmt: skip
RECIPES = {"bf16": {}, "delayed": dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)}
BATCH, SEQ, WARM_UP = 2, 6144, 6


class Step:
    """A model's step as a CUDA graph."""

    def __init__(self, fields: dict[str, Any], recipe: str) -> None:
        torch.manual_seed(0)
        config = ModelConfig(**COMMON | fields)
        self.model = CausalLM(config, recipe=recipe, device="cuda", **RECIPES[recipe]).train()
        self.step = GraphedStep(self.model)
        self.ids = torch.randint(0, 32000, (BATCH, SEQ), device="cuda")
        self.notes = self.model.plan().notes
        for _ in range(WARM_UP):
            self.loss = float(self())
        assert self.step.graph is not None, self.step.failures

    def __call__(self) -> Tensor:
        return self.step(input_ids=self.ids, labels=self.ids)


def milliseconds(step: Callable[[], Tensor], repeats: int = 9) -> list[float]:
    """The times of some steps on the GPU."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return times


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--only", default="", help="Families, by a comma.")
def main(out: Path, only: str) -> None:
    """Measure, print and write."""
    require_gpu()
    document: dict[str, Any] = dict(environment=environment(), batch=BATCH, seq=SEQ, rows=[])
    for name, (fields, shape) in FAMILIES.items():
        if only and name not in only.split(","):
            continue
        for recipe in RECIPES:
            plain = Step(shape, recipe)
            family = Step(shape | fields, recipe) if fields else plain
            own: list[float] = []
            theirs: list[float] = []
            for _ in range(3):  # in turns
                theirs += milliseconds(plain)
                own += milliseconds(family)
            row = dict(family=name, recipe=recipe, ms=median(own), plain_ms=median(theirs))
            row |= dict(speed=row["plain_ms"] / row["ms"], loss=family.loss, notes=family.notes)
            document["rows"].append(row)
            times = f"{row['ms']:8.2f} ms, plain {row['plain_ms']:8.2f}, {row['speed']:.3f}"
            print(f"{name:22} {recipe:8} {times}, loss {family.loss:.4f}", family.notes, flush=True)
            out.write_text(json.dumps(document, indent=1) + "\n")
            del plain, family
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
