"""Imports point down: a module imports only from lower layers, and heavy packages only where they are named."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "te_models"
ORDER = [  # a module may import from earlier lines only; modules of one line do not import each other
    {
        "errors",
        "durable",
        "matmul",
        "environment",
        "collectives",
        "ranks",
        "sharded",
        "fp8_gather",
        "held",
        "cudnn",
        "cuda_capture",
    },
    {"config", "recipe", "train_config", "formats", "tokenizer", "chat", "modes"},
    {"parameter_bytes"},
    {"presets", "state", "nested_state", "extra_state", "data", "hf_families", "memory", "fp8_params"},
    {"checkpoints", "blocks"},
    {"streaming", "offload"},
    {"engine.emulated"},  # one layer as seen from outside; its files order themselves
    {"engine.handover_triton"},
    {"engine.native"},
    {"engine"},
    {"kernels.elementwise", "kernels.attention", "kernels.head"},
    {"kernels.attention_core", "kernels.handover"},
    {"kernels.attention_core_triton", "kernels.head_triton", "kernels.embedding_triton"},
    {"kernels", "hf"},
    {"fp8_state", "checkpointing", "tensor_parallel", "cache", "rope", "te_checkpoint"},
    {"tokens", "decode"},
    {"layers"},
    {"optim.lowbit", "optim.muon8bit", "optim.galore", "optim.groups", "optim.owners"},
    {"optim.packing"},
    {"optim.master"},
    {"optim.te_adam"},
    {"optim", "generate", "plan", "capacity", "metrics", "saved"},
    {"model"},
    {"distributed", "dist_state", "graphed"},
    {"train", "lora", "roofline", "verify"},
    {"peers"},
    {"bench"},
    {"report", "training_data"},
    {"finetune", "converse"},
    {"cli"},
    {"__main__"},
]
LAYER = {name: number for number, names in enumerate(ORDER) for name in names}
ONLY_IN = {
    "transformer_engine": {"engine.native"},
    "transformer_engine_torch": {"engine.native"},
    "click": {"cli"},
    "jinja2": {"chat"},
    "peft": {"lora"},
    "huggingface_hub": {"hf"},
    "safetensors": {"state", "formats"},
    "matplotlib": {"metrics"},
    "rich": {"plan", "capacity", "verify", "report", "finetune", "cli"},
    "triton": {
        "kernels.attention_core_triton",
        "kernels.head_triton",
        "kernels.embedding_triton",
        "engine.handover_triton",
        "engine.emulated.nvfp4_triton",
        "engine.emulated.triton_kernels",
    },
    "torchao": {"optim.lowbit", "peers"},
    "pickle": set(),
}
NO_TORCH = {
    "errors",
    "config",
    "presets",
    "hf_families",
    "modes",
    "recipe",
    "train_config",
    "memory",
    "parameter_bytes",
    "capacity",
}


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") or "__init__"


FILES = {_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def _layer(name: str) -> str:
    """The emulated engine is one layer: its files order themselves."""
    return "engine.emulated" if name.startswith("engine.emulated") else name


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):  # walk, so that imports inside functions count too
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use absolute imports"
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("name", sorted(set(FILES) - {"__init__"}))
def test_imports_point_down(name: str) -> None:
    here = _layer(name)
    assert here in LAYER, f"give te_models/{name} a layer"
    for target in _imports(FILES[name]):
        inner = _layer(target.removeprefix("te_models."))
        if target.startswith("te_models.") and inner in LAYER and inner != here:
            assert LAYER[inner] < LAYER[here], f"{name} (layer {LAYER[here]}) imports {inner} (layer {LAYER[inner]})"
        top = target.split(".")[0]
        assert name in ONLY_IN.get(top, {name}), f"{name} may not import {top}"
        assert not (top == "torch" and name in NO_TORCH), f"{name} must not import torch"


def test_every_file_is_of_readable_length() -> None:
    long = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert {name: lines for name, lines in long.items() if lines > 520} == {}


def test_every_listed_module_exists() -> None:
    assert {name for name in LAYER if name not in FILES} == set()
