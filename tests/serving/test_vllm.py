"""Exports in a real server: `make test-vllm` installs vLLM and runs these tests, on rows of benchmarks/vllm_parity."""

import contextlib
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="a server: run `make test-vllm`")
import transformers
from hf_models import save_gated

from benchmarks import vllm_parity
from te_models import CausalLM
from te_models.errors import UsageError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
QUICK = (("bf16", "float32"), ("fp8-channel", "bfloat16"))


def test_the_plugin_is_installed() -> None:
    (found,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="te_models")
    assert found.value == "te_models.serving.vllm_plugin:register"


@pytest.mark.parametrize("name", [*vllm_parity.GATED, *vllm_parity.FAMILIES])
def test_what_vllm_serves_is_ours(name: str) -> None:
    for row in vllm_parity.compare(name, vllm_parity.KINDS if name == "gated-nano" else QUICK):
        plugins = ("TEModelsDecoderForCausalLM", "Qwen3NextForCausalLM")
        assert (row["architecture"] in plugins) == (name in vllm_parity.GATED)
        if row["dtype"] == "float32":
            assert row["same"] == row["tokens"] and row["largest"] < 1e-3
        # Two roundings of their own, each of which moves probabilities as far as ours does.
        assert row["kl"] <= 4 * row["floor"]
        # A divergence of k comes from log-probabilities that differ by about sqrt(2 k): eight times that is none.
        assert row["gap"] <= 8 * (2 * row["floor"]) ** 0.5


@pytest.mark.parametrize("name", vllm_parity.EXPERTS)
def test_vllm_serves_experts_and_hybrids(name: str) -> None:
    """In FP32 all tokens are ours, which none would be with another expert, factor, bias or rotation.

    Hybrids are served in BF16 alone, where rounding changes the choice of an expert now and then.
    """
    (kind, *_) = vllm_parity.kinds_of(name)
    (row,) = vllm_parity.compare(name, [kind])
    if row["dtype"] == "float32":
        assert row["same"] == row["tokens"] and row["largest"] < 1e-3
    assert row["kl"] <= 4 * row["floor"]


@pytest.mark.parametrize(
    "name, mend", [("deepseek_v3", "rope_of_latents"), ("laguna", "bias_of_laguna")]
)
def test_what_differs_is_vllms_own(name: str, mend: str, tmp_path: Path) -> None:
    """Folders of transformers, and its logits: where the first holds no longer, vLLM has mended its fault."""
    vllm_parity.build_judge(name).save_pretrained(tmp_path)
    judge = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompts = vllm_parity.prompts_for(name, judge.config.vocab_size)
    mends = vllm_parity.MENDED[name]
    # Without these vLLM does not load DeepSeek's bias, and transformers does not write them.
    keys = dict(topk_method="noaux_tc", scoring_func="sigmoid") if name == "deepseek_v3" else {}

    def largest(kept: list[Any]) -> float:
        with contextlib.ExitStack() as stack:
            for each in kept:
                stack.enter_context(each())
            _, scores = vllm_parity.served_by_vllm(
                tmp_path, prompts, judge.config.vocab_size, "float32", keys
            )
        found = 0.0
        for prompt, served in zip(prompts, scores, strict=True):
            with torch.no_grad():
                wanted = judge(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
            found = max(found, (wanted - served).abs().max().item() if len(served) else 0.0)
        return found

    assert largest([each for each in mends if each.__name__ != mend]) > 0.1
    assert largest(list(mends)) < 1e-3


def test_tokens_are_those_of_our_generate(tmp_path: Path) -> None:
    folder = vllm_parity.write_export(vllm_parity.build("gated-nano"), "bf16", tmp_path / "export")
    ours = CausalLM.from_pretrained(folder, device="cpu", recipe="bf16", dtype=torch.float32)
    prompts = vllm_parity.prompts_for("gated-nano", ours.config.vocab_size)
    made, _ = vllm_parity.served_by_vllm(folder, prompts, ours.config.vocab_size, "float32", {})
    for prompt, new in zip(prompts, made, strict=True):
        found = ours.generate(
            torch.tensor([prompt]),
            max_new_tokens=vllm_parity.NEW,
            do_sample=False,
            eos_token_id=None,
        )
        assert found[0, len(prompt) :].tolist() == new


@pytest.mark.parametrize("flag", ["headwise_attn_output_gate", "elementwise_attn_output_gate"])
def test_the_gates_of_the_published_release(flag: str, tmp_path: Path) -> None:
    """Whose rows are inside q_proj, after the queries of each group of heads, in a folder that says Qwen3."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3", **vllm_parity.SIZES)
    save_gated(
        transformers.AutoModelForCausalLM.from_config(config), tmp_path / "theirs", **{flag: True}
    )
    model = CausalLM.from_pretrained(
        tmp_path / "theirs", device="cpu", recipe="bf16", dtype=torch.bfloat16
    )
    folder = vllm_parity.write_export(model, "fp8-channel", tmp_path / "export")
    row = vllm_parity.compare_folder("published", folder, "bfloat16", vllm_parity.PLUGIN)
    assert row["architecture"] == "Qwen3ForCausalLM" and row["kl"] <= 4 * row["floor"]
    folder = vllm_parity.write_export(model, "bf16", tmp_path / "plain")
    row = vllm_parity.compare_folder("published", folder, "float32", vllm_parity.PLUGIN)
    assert row["same"] == row["tokens"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(
                rope_scaling=dict(
                    rope_type="longrope",
                    short_factor=[1.0] * 16,
                    long_factor=[4.0] * 16,
                    original_max_position_embeddings=128,
                )
            ),
            "max-model-len 128",
        ),
        (
            dict(
                attention_gate="none",
                moe=dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32),
            ),
            "dense MLPs",
        ),
    ],
)
def test_what_the_plugin_cannot_serve_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vllm_parity.GATED, "refused", {"qk_norm": True, **options})
    folder = vllm_parity.write_export(vllm_parity.build("refused"), "bf16", tmp_path / "export")
    with pytest.raises(UsageError, match=message):
        vllm_parity.served_by_vllm(folder, [[1]], 384, "float32", vllm_parity.PLUGIN)
