"""The guide to serving: its programs run one after the other, and its commands on a small model."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from te_models import CausalLM
from te_models.cli import main

GUIDE = (Path(__file__).parents[2] / "docs/guide/serving.md").read_text()
# finetune starts from a model on the hub, and serve does not end: tests/cli runs both.
ELSEWHERE = ("finetune", "serve")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of a guide's reader, not of the tests
def test_programs_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for code in blocks("python"):
        exec(compile(code, "serving.md", "exec"), {"__name__": "__main__"})
    assert (tmp_path / "served/config.json").is_file()


@pytest.mark.filterwarnings("ignore:.*needs its own code in transformers")
def test_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2)
    model = CausalLM.from_preset(
        "gated-nano", recipe="delayed", device="cpu", num_key_value_heads=1, **sizes
    )
    ids = torch.arange(64)[None]
    model(ids, labels=ids).loss.backward()
    model.save_pretrained(tmp_path / "runs/mine")
    Path("held_out.txt").write_text("Ten green bottles, hanging on the wall. " * 40)
    ran = 0
    for line in "\n".join(blocks("bash")).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["te-models"] and words[1] not in ELSEWHERE:
            # An export reads no rows, unless it is given data.
            shorter = ["--seq-len", "32"] if words[1] != "export" or "--data" in words else []
            assert main([*words[1:], "--device", "cpu", *shorter]) == 0, line
            ran += 1
    assert ran == 5 and "KL (nats" in capsys.readouterr().out
