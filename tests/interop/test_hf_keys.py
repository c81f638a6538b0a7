"""Keys of config.json that transformers reads, or does not: found in its code, and tried in its models."""

import ast
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fewer import every
from hf_models import close, document_of, load, make_theirs, read_by_transformers
from judge import transformers

from te_models.errors import CheckpointError
from te_models.files.formats import render_json
from te_models.interop.hf_common_keys import HARMLESS
from te_models.interop.hf_families import FAMILIES
from te_models.interop.hf_family import SHARED, Family

# Keys of generation and of heads that are not the language model's.
OTHER_HEADS = {"classifier_dropout", "hidden_dropout", "token_classification_bias", "num_labels"}
# Of the other models in a multimodal folder, which share a file with the text model.
OTHER_PARTS = {
    "depth", "image_size", "image_token_id", "in_channels", "layer_norm_eps", "mm_tokens_per_image", "num_heads",
    "num_position_embeddings", "out_hidden_size", "patch_size", "spatial_merge_size", "temporal_patch_size",
    "text_config", "video_token_id", "vision_config", "get", "deepstack_visual_indexes", "embed_dim",
    "attention_context_left", "attention_context_right", "attention_invalid_logits_value", "attention_logit_cap",
    "audio_config", "audio_embed_dim", "audio_token_id", "conv_kernel_size", "gradient_clipping", "mm_embed_dim",
    "mm_posemb_size", "model_patch_size", "output_proj_dims", "pooling_kernel_size", "position_embedding_size",
    "heads", "layer_scale_init_value", "layers", "ls_init_value", "num_channels", "pop", "projector_bias", "width",
    "merge_size", "patch_temporal", "pos_emb_height", "pos_emb_width", "projector_hidden_act", "projector_hidden_size",
    "residual_weight", "standardize", "subsampling_conv_channels", "use_clipped_linears",
    "pixel_shuffle_ratio", "projector_dropout", "projector_input_dim", "projector_output_dim", "vision_output_dim",
    "fullatt_block_indexes", "mlp_ratio", "tokens_per_second", "window_size",
}  # fmt: skip
# Of linear attention alone, in a cache that its families fill.
OTHER_CACHES = {"number_of_conv_states"}
IDS = torch.randint(11, 120, (2, 23), generator=torch.Generator().manual_seed(0))


def config_class(family: Family) -> Any:
    """Return transformers' config class of the text model of a family; None if it has none."""
    mapping = transformers.CONFIG_MAPPING
    kind = family.text_type or family.model_type
    if kind not in mapping:
        return None
    if family.inner and not family.text_type:
        return type(mapping[kind]().text_config)
    return mapping[kind]


def is_config(node: ast.expr) -> bool:
    """Return whether an expression is a config: a name such as `config` or `self.config`."""
    if isinstance(node, ast.Name):
        return "config" in node.id.lower()
    return isinstance(node, ast.Attribute) and "config" in node.attr.lower()


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def text_of(node: ast.expr) -> str | None:
    return (
        str(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
    )


def keys_read(tree: ast.AST, own: bool = False) -> Iterator[str]:
    """Yield the attributes of configs that code reads; with `own` it is that of a config, which is `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            of_config = is_config(node.value) or (own and is_self(node.value))
            if of_config:
                yield node.attr
        if not isinstance(node, ast.Call) or not node.args:
            continue
        key = None
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            if is_config(node.args[0]) or (own and is_self(node.args[0])):
                key = text_of(node.args[1])
        elif own and isinstance(node.func, ast.Attribute) and node.func.attr in ("pop", "get"):
            holder = node.func.value
            if isinstance(holder, ast.Name) and "kwargs" in holder.id:
                key = text_of(node.args[0])
        if key is not None:
            yield key


def keys_of_file(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found = set(keys_read(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            found |= set(keys_read(node, own=True))
    return {key for key in found if not key.startswith("_")}


def not_of_every_config(keys: set[str]) -> set[str]:
    """Return the keys that are no attributes of every config, such as `to_dict`."""
    return keys - {*dir(transformers.PreTrainedConfig)}


@pytest.mark.parametrize(
    "family", every(2, FAMILIES), ids=lambda family: family.model_type + family.text_type
)
def test_every_key_that_transformers_reads_is_known(family: Family) -> None:
    """So a key that is not known changes nothing there."""
    found = config_class(family)
    if found is None:
        pytest.skip("transformers has no class for it")
    folder = Path(inspect.getfile(found)).parent
    files = [*folder.glob("configuration_*.py"), *folder.glob("modeling_*.py")]
    if not any(path.name.startswith("modeling_") for path in files):
        pytest.skip("transformers has its config alone")
    read = set().union(*map(keys_of_file, files))
    assert {"hidden_size", "num_hidden_layers"} <= read
    read |= found.attribute_map.keys()
    read |= {
        name
        for name in found.__dataclass_fields__
        if name not in dir(transformers.PreTrainedConfig)
    }
    known = {*family.known(), *HARMLESS, *SHARED, *family.ignored, *OTHER_PARTS, *OTHER_HEADS}
    assert not_of_every_config(read) - known == set(), " ".join(
        sorted(not_of_every_config(read) - known)
    )


@pytest.mark.parametrize("name", ["cache_utils", "masking_utils"])
def test_every_key_that_caches_and_masks_read_is_known(name: str) -> None:
    path = Path(transformers.__file__).parent / f"{name}.py"
    read = not_of_every_config(keys_of_file(path))
    assert "sliding_window" in read
    assert read - {*SHARED, *HARMLESS, *OTHER_CACHES, "num_hidden_layers"} == set()


# Keys that files have, or that another family reads, with values that would mean something there.
ODD: dict[str, Any] = {
    "auto_map": {"AutoModel": "code.Model"}, "num_labels": 3, "pruned_heads": {}, "model_name": "x",
    "embd_dropout": 0.0, "gradient_checkpointing": True, "n_group": 1, "topk_group": 2, "moe_layer_freq": 1,
    "mlp_only_layers": [], "use_grouped_mm": True, "load_balance_coeff": 0.001, "num_expert_groups": 1,
    "num_limited_groups": 1, "score_func": "sigmoid", "route_norm": True, "topk_method": "noaux_tc",
    "first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "use_qk_norm": True, "rope_interleave": True,
    "shared_expert_intermediate_size": 0, "attention_bias": False, "qk_layernorm": True, "parallel_attn": True,
    "logit_scale": 0.25, "logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
    "attention_multiplier": 0.3, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0, "mup_enabled": True,
    "query_pre_attn_scalar": 7, "no_rope_layers": [1, 0, 1, 0], "no_rope_layer_interval": 2, "gating": "per-head",
    "attn_output_gate": True, "head_dim_v": 8, "kv_lora_rank": 8, "q_lora_rank": 8, "num_local_experts": 4,
    "num_experts": 4, "router_aux_loss_coef": 0.5, "norm_topk_prob": True, "routed_scaling_factor": 3.0,
    "clip_qkv": 1.0, "resid_pdrop": 0.5, "embd_pdrop": 0.5, "use_cache": False, "mlp_bias": False, "qkv_bias": True,
    "use_bias": True, "original_max_position_embeddings": 8, "sliding_window_pattern": 2, "swiglu_limit": 1.0,
    "rope_local_base_freq": 3.0, "use_sliding_window": True, "max_window_layers": 1, "attention_out_bias": True,
    "is_causal": False, "attention_chunk_size": 3, "sliding_window": 3, "layer_types": ["sliding_attention"] * 4,
    "hidden_activation": "relu", "rope_theta": 77.0, "query_scale_beta": 1.0, "use_bidirectional_attention": True,
    "full_attention_interval": 2, "linear_num_key_heads": 2, "scoring_func": "softmax", "moe_intermediate_size": 8,
}  # fmt: skip
CASES = (
    "llama2", "mistral", "qwen2", "qwen3", "smollm3", "ministral-odd", "ministral3-odd", "cwm-odd", "seed_oss-odd",
    "phi3-odd", "granite-odd", "arcee-odd", "olmo2-odd", "olmo3-odd", "exaone4-odd", "glm-odd", "glm4-odd",
    "ernie4_5-odd", "gemma-odd", "gemma2-odd", "gemma3_text-odd", "afmoe-odd", "qwen3_moe-odd", "qwen2_moe-odd",
    "mixtral-odd", "olmoe-odd", "glm4_moe-odd", "deepseek_v3-odd", "deepseek_v2-odd", "glm4_moe_lite-odd",
    "gpt_oss-odd", "qwen3_next-odd", "qwen3_5_moe_text-odd", "laguna-odd",
)  # fmt: skip


@torch.no_grad()
def logits_or_problem(folder: Path) -> torch.Tensor | str:
    """Return transformers' logits, or why it has none."""
    try:
        return read_by_transformers(folder)(IDS).logits
    except Exception as problem:
        return str(problem)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_each_odd_key_does_what_it_does_in_transformers(case: str, tmp_path: Path) -> None:
    """It changes nothing, and is warned of if it is not read; or it is computed; or it is refused."""
    make_theirs(case, tmp_path)
    document = document_of(tmp_path)
    wrong = []
    layers = document["num_hidden_layers"]
    for key, value in ODD.items():
        if key in ("layer_types", "no_rope_layers"):
            value = (value * layers)[:layers]
        (tmp_path / "config.json").write_bytes(render_json({**document, key: value}, "config.json"))
        theirs = logits_or_problem(tmp_path)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            try:
                ours = load(tmp_path)(IDS).logits
            except (CheckpointError, ValueError):
                continue
        if isinstance(theirs, str):
            wrong.append(f"{key}: read, and transformers refuses it: {theirs[:90]}")
        elif (ours - theirs).abs().max() > 2e-4 * max(1, theirs.abs().max()):
            wrong.append(f"{key}: differs by {(ours - theirs).abs().max():.2g}")
    assert not wrong, "\n".join(wrong)


# The keys of published files that transformers does not read, on small models of their families.
RELEASES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "GLM-4.7-Flash": (
        "glm4_moe_lite-plain",
        dict(topk_method="noaux_tc", first_k_dense_replace=1, partial_rotary_factor=1.0, rope_scaling=None),
        {"topk_method", "first_k_dense_replace"},
    ),
    "Trinity": (
        "afmoe-odd",
        dict(load_balance_coeff=5e-5, n_group=1, topk_group=1, num_expert_groups=1, num_limited_groups=1,
             route_norm=True, score_func="sigmoid", use_grouped_mm=True, auto_map={"AutoConfig": "c.AfmoeConfig"}),
        {"load_balance_coeff", "n_group", "topk_group", "num_expert_groups", "num_limited_groups", "route_norm",
         "score_func", "use_grouped_mm", "auto_map"},
    ),
    "Qwen3-Coder": (
        "qwen3_moe-odd",
        dict(use_qk_norm=True, shared_expert_intermediate_size=0, qkv_bias=False),
        {"use_qk_norm", "shared_expert_intermediate_size"},
    ),
    "a model with a head for classes": (
        "llama2",
        dict(auto_map={"AutoModel": "c.M"}, num_labels=3, pruned_heads={}, model_name="x", embd_dropout=0.0,
             gradient_checkpointing=True, n_group=1, moe_layer_freq=1, mlp_only_layers=[], pad_token_id=-1),
        {"auto_map", "num_labels", "pruned_heads", "model_name", "embd_dropout", "gradient_checkpointing", "n_group",
         "moe_layer_freq", "mlp_only_layers"},
    ),
    "YaRN of Nous": (
        "llama2",
        dict(rope_parameters=None, rope_theta=10000.0,
             rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=32, finetuned=True)),
        {"rope_scaling.finetuned"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASES)
@torch.no_grad()
def test_keys_that_change_nothing_are_named_once_and_written_back(
    name: str, tmp_path: Path
) -> None:
    case, keys, unread = RELEASES[name]
    make_theirs(case, tmp_path / "theirs")
    document = {**document_of(tmp_path / "theirs"), **keys}
    (tmp_path / "theirs" / "config.json").write_bytes(render_json(document, "config.json"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = load(tmp_path / "theirs")
    lines = [str(one.message) for one in said if "does not read" in str(one.message)]
    assert len(lines) == 1
    named = lines[0].partition("does not read ")[2].partition(" of ")[0].split(", ")
    assert set(named) == unread
    close(model(IDS).logits, read_by_transformers(tmp_path / "theirs")(IDS).logits)
    model.save_pretrained(tmp_path / "back", format="hf")
    assert document_of(tmp_path / "back") == document


def test_all_that_is_not_supported_is_in_one_message(tmp_path: Path) -> None:
    make_theirs("llama2", tmp_path)
    changes = dict(
        attention_dropout=0.1,
        hidden_act="tanh",
        rope_parameters=dict(rope_type="axial"),
        sliding_window=8,
        model_name="x",
    )
    document = {**document_of(tmp_path), **changes}
    (tmp_path / "config.json").write_bytes(render_json(document, "config.json"))
    with pytest.raises(CheckpointError) as refused:
        load(tmp_path)
    line = str(refused.value)
    assert "attention_dropout=0.1" in line and "sliding_window=8" in line and "'axial'" in line
    assert "model_name" not in line and "\n" not in line
