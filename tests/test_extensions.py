"""Another package adds kinds of layers, a family and a preset: examples/extension, found by its entry point."""

import os
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_process

from te_models.config.presets import PRESETS, get_preset
from te_models.errors import UsageError
from te_models.extensions import register_family, register_mixer, register_mlp, register_preset
from te_models.interop.hf_families import FAMILIES

EXAMPLE = Path(__file__).parent.parent / "examples/extension"
ROOT = Path(__file__).parent.parent


def installed(folder: Path, entry: str) -> dict[str, str]:
    """Return an environment in which a package with this entry point is installed, as pip leaves it."""
    about = folder / "te_token_shift-0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: te-token-shift\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text(f"[te_models.extensions]\ntoken_shift = {entry}\n")
    paths = [str(folder), str(EXAMPLE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


# What a user does with it: plans, trains in FP8, decodes, packs, saves and loads; the package is never imported here.
PROGRAM = """
import sys, torch, te_models
from te_models.errors import UsageError
assert "token-shift-nano" in te_models.list_presets()
torch.manual_seed(0)
model = te_models.CausalLM.from_preset("token-shift-nano", device="cpu", engine="emulated", recipe="current")
assert "shift.in_proj" in str(model) and model.plan()
ids = torch.randint(0, 288, (2, 32))
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
losses = []
for _ in range(12):
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0] - 0.3, losses
model.save_pretrained(sys.argv[1] + "/own")
model.save_pretrained(sys.argv[1] + "/hf", format="hf")
how = dict(device="cpu", engine="emulated", dtype=torch.float32, recipe="bf16")
for name in ("own", "hf"):
    again = te_models.CausalLM.from_pretrained(f"{sys.argv[1]}/{name}", **how).eval()
    assert again.config == model.config
    for (one, a), (other, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert one == other and torch.equal(a.float(), b), one
    assert torch.equal(
        again.generate(ids[:, :5], max_new_tokens=9),
        again.generate(ids[:, :5], max_new_tokens=9, use_cache=False),
    )
    with torch.no_grad():
        documents = torch.arange(2).repeat_interleave(torch.tensor([12, 20]))[None]
        packed = again(ids[:1], document_ids=documents).logits
        for part in (slice(0, 12), slice(12, 32)):
            torch.testing.assert_close(packed[:, part], again(ids[:1, part]).logits, atol=1e-5, rtol=0)
        mask = torch.ones(1, 32, dtype=torch.long)
        mask[:, :7] = 0
        padded = again(ids[:1], attention_mask=mask).logits[:, 7:]
        torch.testing.assert_close(padded, again(ids[:1, 7:]).logits, atol=1e-5, rtol=0)
"""


@pytest.mark.slow
def test_a_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    environment = installed(tmp_path / "site", "te_token_shift:register")
    run_process([sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment)


def test_the_entry_point_is_that_of_the_example() -> None:
    text = (EXAMPLE / "pyproject.toml").read_text()
    assert (
        '[project.entry-points."te_models.extensions"]\ntoken_shift = "te_token_shift:register"'
        in text
    )


@pytest.mark.slow
def test_a_package_that_fails_is_named(tmp_path: Path) -> None:
    environment = installed(tmp_path / "site", "te_token_shift:no_such_function")
    program = """
try:
    import te_models
except Exception as error:
    line = str(error)
    assert line.startswith("te-token-shift adds 'token_shift' to te-models, and that failed: AttributeError"), line
    assert chr(10) not in line
else:
    raise SystemExit("it was imported")
"""
    run_process([sys.executable, "-c", program], env=environment)


def test_names_that_are_taken_and_other_classes_are_refused() -> None:
    with pytest.raises(UsageError, match="kind of mixer 'full_attention' already"):
        register_mixer("full_attention", None, None, None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is no subclass of FeedforwardSpec"):
        register_mlp("new", None, torch.nn.Linear, torch.nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="model_type 'llama' already"):
        register_family(FAMILIES[0])
    with pytest.raises(
        UsageError, match="the family is a dict: give a te_models.interop.hf_family"
    ):
        register_family(dict(model_type="new"))  # type: ignore[bad-argument-type]
    name = next(iter(PRESETS))
    with pytest.raises(UsageError, match="the fields are a ModelConfig: give a dict of them"):
        register_preset("new", get_preset(name))  # type: ignore[bad-argument-type]
    with pytest.raises(UsageError, match=f"preset {name!r} already"):
        register_preset(name, PRESETS[name])
    with pytest.raises(UsageError, match="hiden_size"):
        register_preset("new", dict(hiden_size=3))
