"""Imports point down, between packages and within them, and heavy libraries are imported only where they are named."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "te_models"
COMMANDS = (
    "bench", "chat", "convert", "evaluate", "export", "finetune",
    "generate", "list", "parity", "plan", "pretrain", "verify",
)  # fmt: skip
ORDER = {  # packages, lowest first, each with its modules, lowest first; modules of one set do not import each other
    "errors": [{"errors"}],
    "config": [
        {"chunk_sizes", "data", "layout", "options", "recompute_modes", "toml", "training"},
        {"recipe"},
        {"model"},
        {"presets"},
        {"shipped"},
    ],
    "planning": [
        {"parameter_bytes", "printable"},
        {"operations", "precision_plan"},
        {"memory_estimate"},
        {"memory_plan"},
        {"smallest_change"},
    ],
    "files": [{"atomic", "lock"}, {"formats"}],
    "distributed": [{"collectives", "control", "dtensor", "environment"}],
    "device": [{"choice", "cuda_capture", "cudnn", "determinism", "measured"}, {"cpu_matmul"}],
    "kernels": [
        {"early_save", "elementwise", "embedding_triton", "fp8_triton", "lm_head_triton", "sdpa"}
        | {"softcap_attention", "span_attention_triton"},
        {"gated_attention", "handover", "handover_triton", "lm_head"},
        {"dispatch", "gated_attention_triton"},
    ],
    "engine": [{"__init__", "emulated", "native"}],
    "fp8": [{"fsdp_gather", "scaling_state"}, {"extra_state", "primary_weights"}, {"region"}],
    "model": [
        {"kv_cache", "offload", "options", "recipe_fit", "rope", "targets", "te_modules", "tensor_parallel"},
        {"inputs", "recompute"},
        {"forward_context"},
        {"attention", "mlp"},
        {"block"},
        {"decoder", "user_modules"},
    ],
    "interop": [
        {"hf_parts", "hf_places", "model_card", "origin"},
        {"hf_families", "hub", "quantized", "te_extra_state"},
        {"stored_weights"},
        {"hf", "te_checkpoint"},
    ],
    "saving": [{"folder", "state_dict"}, {"run_folder"}, {"pretrained", "sharded"}],
    "optim": [
        {"gradients", "groups", "lowbit_triton", "parameter_owners", "state_tensors"},
        {"galore", "lowbit", "muon8bit"},
        {"master"},
        {"te_adam"},
        {"__init__"},
    ],
    "data": [
        {"files", "formats", "json_files", "own_batches", "template_process"},
        {"chat_template", "rows", "tokenizer_conversion"},
        {"documents", "tokenizer"},
        {"encoding", "python_docstrings", "sources"},
        {"own_records", "packing"},
        {"corpus_chunks", "dataset"},
        {"streaming"},
        {"training_data"},
    ],
    "serving": [{"formats", "text"}, {"export", "served"}, {"parity"}],
    "generation": [{"decode_loop", "options", "sampling"}, {"generate"}, {"text"}, {"conversation"}],
    "causal_lm": [{"causal_lm"}],
    "huggingface": [{"cache", "config", "registration", "saving"}, {"modeling"}],
    "training": [
        {"settings"},
        {
            "cuda_graph",
            "evaluation",
            "lora_targets",
            "metrics",
            "parallel",
            "plots",
            "restore",
            "result",
            "resume",
            "stop_signals",
            "timing",
        },
        {"lora_config", "lora_layer"},
        {"lora"},
        {"launch", "lora_run", "run_file", "samples", "trainer"},
        {"preflight"},
        {"loggers", "report"},
        {"finetune"},
    ],
    "inspect": [{"bench_report", "environment", "peers", "roofline"}, {"bench", "evaluate", "verify"}, {"harness"}],
    "cli": [{"options"}, {"sampling", "training"}, set(COMMANDS), {"commands"}, {"__init__"}],
    "__main__": [{"__main__"}],
}
ONLY_IN = {
    "transformer_engine": {"engine.native"},
    "transformer_engine_torch": {"engine.native"},
    "click": {f"cli.{name}" for name in (*COMMANDS, "commands", "options", "sampling", "training")},
    "jinja2": {"data.template_process"},
    "peft": {"training.lora", "training.lora_config", "training.lora_layer"},
    "huggingface_hub": {"interop.hub", "interop.model_card"},
    "transformers": {
        "data.tokenizer_conversion",
        "huggingface.cache",
        "huggingface.config",
        "huggingface.modeling",
        "inspect.harness",
    },
    "safetensors": set(),
    "matplotlib": {"training.plots"},
    "rich": {
        "cli.bench",
        "cli.evaluate",
        "cli.list",
        "cli.options",
        "inspect.bench_report",
        "inspect.evaluate",
        "inspect.verify",
        "planning.memory_plan",
        "planning.precision_plan",
        "planning.printable",
        "serving.parity",
        "training.finetune",
        "training.report",
        "training.samples",
    },
    "triton": {
        "engine.emulated.nvfp4_triton",
        "engine.emulated.triton_kernels",
        "kernels.embedding_triton",
        "kernels.fp8_triton",
        "kernels.gated_attention_triton",
        "kernels.handover_triton",
        "kernels.lm_head_triton",
        "kernels.span_attention_triton",
        "optim.lowbit_triton",
    },
    "torchao": {"inspect.peers", "optim.lowbit", "optim.lowbit_triton"},
    "lm_eval": {"inspect.harness"},
    "pickle": set(),
}
NO_TORCH = {
    "config.chunk_sizes",
    "config.data",
    "config.layout",
    "config.model",
    "config.options",
    "config.presets",
    "config.recipe",
    "config.recompute_modes",
    "config.shipped",
    "config.toml",
    "config.training",
    "data.python_docstrings",
    "errors",
    "interop.hf_families",
    "interop.hf_parts",
    "interop.hf_places",
    "planning.memory_estimate",
    "planning.memory_plan",
    "planning.smallest_change",
    "planning.operations",
    "planning.parameter_bytes",
    "training.settings",
}


def _full(package: str, name: str) -> str:
    return package if name in (package, "__init__") else f"{package}.{name}"


LAYER = {
    _full(package, name): (place, floor)
    for place, (package, floors) in enumerate(ORDER.items())
    for floor, names in enumerate(floors)
    for name in names
}


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") or "__init__"


# Code for transformers that is copied into folders and never imported here.
COPIED = ROOT / "interop/remote_code"
FILES = {_name(path): path for path in sorted(ROOT.rglob("*.py")) if path.parent != COPIED}
PACKAGES = {name: path for name, path in FILES.items() if path.name == "__init__.py" and name != "__init__"}


def _layer(name: str) -> str:
    """Treat the emulated engine as one module: its files order themselves."""
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


def _arrows(name: str) -> set[str]:
    """Return the modules of te_models that `name` imports."""
    inner = {_layer(target.removeprefix("te_models.")) for target in _imports(FILES[name]) if "te_models." in target}
    return {target for target in inner if target in LAYER and target != _layer(name)}


def _only_a_docstring(name: str) -> bool:
    return name in PACKAGES and len(ast.parse(FILES[name].read_text()).body) == 1


@pytest.mark.parametrize("name", sorted(set(FILES) - {"__init__"}))
def test_imports_point_down(name: str) -> None:
    here = _layer(name)
    assert here in LAYER or _only_a_docstring(name), f"give te_models/{name} a place in ORDER"
    for target in _arrows(name):
        assert LAYER[target] < LAYER[here], f"{name} {LAYER[here]} imports {target} {LAYER[target]}"
    for target in _imports(FILES[name]):
        top = target.split(".")[0]
        assert name in ONLY_IN.get(top, {name}), f"{name} may not import {top}"
        assert not (top == "torch" and name in NO_TORCH), f"{name} must not import torch"


def test_the_design_lists_the_packages_in_this_order() -> None:
    block = (ROOT.parent / "docs/internals/design.md").read_text().split("```\n")[1]
    assert [line.split()[0] for line in block.splitlines()] == [name for name in reversed(ORDER) if name != "__main__"]


def test_few_modules_lie_outside_packages() -> None:
    assert len(set(ROOT.glob("*.py")) - {ROOT / "__init__.py", ROOT / "__main__.py"}) <= 6


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_package_says_what_it_holds(name: str) -> None:
    text = ast.get_docstring(ast.parse(PACKAGES[name].read_text()))
    assert text is not None
    assert name == "engine.emulated" or "Not here: " in text


def test_every_file_is_of_readable_length() -> None:
    long = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert {name: lines for name, lines in long.items() if lines > 520} == {}


def test_code_for_transformers_needs_only_torch_and_transformers() -> None:
    for path in COPIED.glob("*.py"):
        nodes = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        named = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in nodes]
        tops = {str(name).split(".")[0] for name in named}
        assert tops <= {
            "collections", "functools", "math", "typing", "torch", "transformers", "configuration_te_models",
        }  # fmt: skip


def test_every_listed_module_exists() -> None:
    named = {*LAYER, *NO_TORCH, *(name for names in ONLY_IN.values() for name in names)}
    assert {name for name in named if name not in FILES} == set()
