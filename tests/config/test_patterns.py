"""The table `precision` of a recipe: which te.Linear it decides, and what it refuses."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from te_models.config.attention import AttentionSpec
from te_models.config.layer import LinearSpec, Section
from te_models.config.precision import precisions
from te_models.config.presets import get_preset
from te_models.config.recipe import get_recipe, recipe_from_dict
from te_models.errors import ConfigError, UsageError
from te_models.planning.measured import PARTS, MeasuredStep
from te_models.planning.memory_plan import plan_memory
from te_models.planning.training import Training

CONFIG = get_preset("gated-nano")  # six layers


class WithRouter(AttentionSpec):
    """Attention with one more te.Linear, which is BF16 under every recipe."""

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        router = LinearSpec("router", self.hidden_size, (Section("router", 8, 8),), fp8=False)
        return (*super().linears, router)


def found(
    precision: Mapping[str, str], recipe: str = "delayed", **options: Any
) -> dict[str, tuple[str, str]]:
    """Name -> (name of its recipe, reason) of every te.Linear."""
    asked = precisions(get_recipe(recipe, precision=precision, **options), CONFIG.layers)
    return {name: (p.recipe.name if p.recipe else "bf16", p.reason) for name, p in asked.items()}


def test_edges_come_first_then_the_table_in_order() -> None:
    got = found(
        {"layers.[01].*": "current", "*.down_proj": "bf16", "layers.1.mlp.down_proj": "delayed"}
    )
    assert got["layers.0.self_attn.o_proj"] == ("current", "pattern 'layers.[01].*'")
    assert (
        got["layers.0.mlp.down_proj"]
        == got["layers.5.mlp.down_proj"]
        == ("bf16", "pattern '*.down_proj'")
    )
    assert got["layers.1.mlp.down_proj"] == ("delayed", "pattern 'layers.1.mlp.down_proj'")
    assert got["layers.2.self_attn.o_proj"] == ("delayed", "recipe = 'delayed'")
    assert got["layers.5.self_attn.o_proj"] == ("bf16", "num_layers_at_end_in_bf16 = 1")
    assert got["lm_head"] == ("bf16", "lm_head = 'bf16'")
    swapped = found({"layers.1.mlp.down_proj": "delayed", "*.down_proj": "bf16"})
    assert swapped["layers.1.mlp.down_proj"] == ("bf16", "pattern '*.down_proj'")


def test_its_own_name_is_the_recipe_with_its_own_fields() -> None:
    recipe = get_recipe("delayed", margin=2, precision={"layers.0.*": "delayed"})
    asked = precisions(recipe, CONFIG.layers)
    assert asked["layers.0.mlp.down_proj"].recipe is recipe
    other = precisions(get_recipe("current", precision={"layers.0.*": "delayed"}), CONFIG.layers)
    named = other["layers.0.mlp.down_proj"].recipe
    assert named is not None and named.fields["margin"] == 0


@pytest.mark.parametrize("recipe", ["delayed", "bf16"])
def test_what_is_bf16_by_nature_stays_so(recipe: str) -> None:
    mixer = WithRouter(**vars(CONFIG.layers[0].mixer))
    layers = tuple(dataclasses.replace(layer, mixer=mixer) for layer in CONFIG.layers)
    asked = precisions(get_recipe(recipe, precision={"layers.2.*": "current"}), layers)
    assert asked["layers.2.self_attn.router"] == (None, "under every recipe", True)
    assert asked["layers.3.self_attn.router"] == (None, "under every recipe", True)
    assert asked["layers.2.self_attn.o_proj"].recipe is not None
    with pytest.raises(ConfigError, match=r"\.router is BF16 under every recipe: leave it out"):
        precisions(get_recipe(recipe, precision={"*.router": "current"}), layers)
    precisions(get_recipe(recipe, precision={"*.router": "bf16"}), layers)


REFUSED = {
    "*.dwn_proj": "unknown te.Linear '*.dwn_proj' of precision: did you mean '*.mlp.down_proj'?",
    "layers.9.*": "unknown te.Linear 'layers.9.*' of precision: ",
    "*.q_proj": "'*.q_proj' of precision: its rows are part of qkvg_proj, one GEMM: write '*.qkvg_proj'",
    "layers.2.mlp.gate_proj": "its rows are part of gate_up_proj, one GEMM: write 'layers.2.mlp.gate_up_proj'",
    "up_proj": "its rows are part of gate_up_proj, one GEMM: write '*.gate_up_proj'",
}  # fmt: skip


@pytest.mark.parametrize("pattern", REFUSED)
def test_a_pattern_that_matches_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match=re.escape(REFUSED[pattern])):
        found({pattern: "bf16"})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"*": "fp8"}, r"unknown recipe 'fp8' of precision\['\*'\]: did you mean 'mxfp8'"),
        ({"*": 1}, "unknown recipe '1' of precision"),
        ({"": "bf16"}, "give a table of patterns"),
        ({3: "bf16"}, "give a table of patterns"),
        (["*.down_proj"], "give a table of patterns"),
        ("*.down_proj=bf16", "give a table of patterns"),
        ({"*" * 201: "bf16"}, "give a table of patterns"),
        (dict.fromkeys((f"*{n}" for n in range(257)), "bf16"), "give a table of patterns"),
    ],
)
def test_a_table_that_is_none_is_refused(table: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        get_recipe("delayed", precision=table)
    with pytest.raises(UsageError, match=message):
        recipe_from_dict({"scheme": "none", "precision": table})


def test_a_recipe_file_has_a_table(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'scheme = "Float8CurrentScaling"\n[precision]\n"*.down_proj" = "bf16"\n"layers.1.*" = "mine"\n'
    )
    recipe = get_recipe(path)
    assert recipe.precision == {"*.down_proj": "bf16", "layers.1.*": "mine"}
    assert recipe_from_dict(recipe.to_dict()).to_dict() == recipe.to_dict()
    assert (
        "precision" not in get_recipe("current").to_dict()
    )  # so that the folders of today are written as they were


def test_the_model_has_a_state_and_an_alignment_if_any_of_its_linears_has() -> None:
    recipe = get_recipe("current", precision={"layers.1.*": "delayed", "layers.2.*": "nvfp4"})
    assert recipe.stateful and recipe.quantized and recipe.row_alignment == 128
    assert get_recipe("bf16", precision={"*.down_proj": "mxfp8"}).row_alignment == 32
    assert not get_recipe("bf16", precision={"*.down_proj": "bf16"}).quantized
    assert [used.name for used in recipe.in_use] == ["current", "delayed", "nvfp4"]


def test_the_memory_plan_counts_the_copies_of_each_linear() -> None:
    table = {"*.down_proj": "bf16", "layers.1.self_attn.*": "mxfp8"}
    recipe = get_recipe("delayed", amax_history_len=16, precision=table)
    setting = Training(batch_size=2, seq_len=64, fused=False).setting
    run = MeasuredStep(CONFIG, recipe, setting).run(2)
    inside = {"qkvg_proj", "o_proj", "gate_up_proj"}
    for depth, copied in ((0, set()), (1, inside), (2, inside)):
        expected = 0
        for name, linear in CONFIG.layers[depth].linears.items():
            if linear.name not in copied:
                continue
            size = linear.inputs * linear.outputs
            mx = depth == 1 and name.startswith("self_attn")
            scales = size // 32  # a byte per 32 values of each copy
            expected += 2 * (size + scales) if mx else 2 * size + 4
        found = run.forward[depth].end.tolist()[PARTS.index("fp8_weight_copies")]
        assert found == pytest.approx(expected, rel=0.01)
    delayed = 1 + 3 * 3  # gate_up_proj of layer 1, and three linears each of layers 2 to 4
    plan = plan_memory(CONFIG, recipe, batch_size=2, seq_len=64)
    assert plan.moments[-1].fp8_weight_copies == delayed * 5 * 4 * 17
