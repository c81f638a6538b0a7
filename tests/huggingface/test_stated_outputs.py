"""What a config.json says about the outputs of `forward`: transformers follows it, and TEModelsForCausalLM too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make_theirs, read_by_transformers

from te_models.huggingface.modeling import TEModelsForCausalLM

IDS = torch.randint(11, 120, (2, 19), generator=torch.Generator().manual_seed(0))
MIXTURES = (
    "mixtral-odd",
    "qwen3_moe-odd",
    "gpt_oss-odd",
    "qwen3_next-odd",
    "olmoe-odd",
    "deepseek_v3-odd",
    "llama4_text-odd",
)


def load(folder: Path) -> TEModelsForCausalLM:
    return TEModelsForCausalLM.from_pretrained(folder, recipe="bf16", dtype="float32", device="cpu")


@pytest.mark.filterwarnings("ignore:.*does not read router_aux_loss_coef of deepseek_v3")
@pytest.mark.parametrize("case", MIXTURES)
def test_the_balance_loss_of_experts_is_added_where_config_json_asks_for_it(
    case: str, tmp_path: Path
) -> None:
    """DeepSeek's classes have no such loss, whatever their config says."""
    make_theirs(case, tmp_path / "theirs", output_router_logits=True, router_aux_loss_coef=0.5)
    judge = read_by_transformers(tmp_path / "theirs")(input_ids=IDS, labels=IDS)
    model = load(tmp_path / "theirs")
    output = model(input_ids=IDS, labels=IDS)
    torch.testing.assert_close(output.loss, judge.loss, rtol=1e-4, atol=1e-4)
    assert model.config.output_router_logits is (getattr(judge, "aux_loss", None) is not None)
    model.save_pretrained(tmp_path / "own")
    again = load(tmp_path / "own")(input_ids=IDS, labels=IDS)
    assert torch.equal(again.loss, output.loss)


@pytest.mark.parametrize("stated", [{"use_cache": False}, {"output_hidden_states": True}])
@torch.no_grad()
def test_other_outputs_follow_config_json(stated: dict[str, Any], tmp_path: Path) -> None:
    make_theirs("qwen3", tmp_path, **stated)
    ours = load(tmp_path).eval()(input_ids=IDS)
    theirs = read_by_transformers(tmp_path)(input_ids=IDS)
    found = [
        (output.past_key_values is None, output.hidden_states is None) for output in (ours, theirs)
    ]
    assert found[0] == found[1]


def test_a_changed_output_is_saved(tmp_path: Path) -> None:
    make_theirs("mixtral-odd", tmp_path / "theirs")
    model = load(tmp_path / "theirs")
    assert not model.config.output_router_logits
    model.config.output_router_logits = True
    model.save_pretrained(tmp_path / "own")
    assert load(tmp_path / "own").config.output_router_logits is True
