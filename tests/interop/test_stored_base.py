"""Releases whose quantized weights stay as they are stored: values, training, adapters and files; peft is the judge."""

import copy
import io
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from fewer import every, some
from safetensors.torch import load_file
from stored_releases import LAYOUTS, publish
from tiny_runs import tiny_trainer
from torch import Tensor

pytest.importorskip("peft")

from te_models import CausalLM, add_lora, get_preset, get_recipe, load_lora
from te_models.adapters.layers import LoraLinear
from te_models.cli import main
from te_models.errors import CheckpointError, UsageError
from te_models.fp8.primary_weights import plain
from te_models.model.options import SKETCH
from te_models.numerics.stored import StoredRows, StoredWeight, joined
from te_models.planning.memory_plan import plan_memory
from te_models.planning.stored_base import StoredBase
from te_models.saving.pretrained import stored_storages
from te_models.training.lora import save_lora
from te_models.training.parallel import Parallel

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)
RELEASES = [
    ("mxfp4", "gpt_oss"),
    ("nvfp4", "qwen3"),
    ("nvfp4", "qwen3_moe"),
    ("modelopt-nvfp4", "qwen3"),
    ("modelopt-nvfp4", "qwen3_moe"),
    ("fp8-block", "qwen3"),
    ("fp8-block", "qwen3_moe"),
    ("fp8-channel", "qwen3"),
    ("fp8-tensor", "qwen3"),
]
RECIPES = ["bf16", "current", "delayed", "blockwise", "mxfp8", "nvfp4"]
IDS = torch.arange(2 * 32).reshape(2, 32) * 7 % 271
# Every layer in FP8, where a recipe would keep the first and the last ones of large models in BF16.
INSIDE = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)


def load(folder: Path, base_weights: str, recipe: str = "bf16", **options: Any) -> CausalLM:
    """The release, in BF16 and on a CPU."""
    inside = {} if recipe == "bf16" else INSIDE
    how: dict[str, Any] = dict(device="cpu", dtype=torch.bfloat16) | inside | options
    return CausalLM.from_pretrained(folder, recipe=recipe, base_weights=base_weights, **how)


def adapted(model: CausalLM, rank: int = 4) -> Any:
    """The model with adapters on all linears and on every expert, which already change its outputs."""
    experts = ["experts"] if model.config.moe else []
    torch.manual_seed(3)
    found = add_lora(model, r=rank, target_modules=["all-linear", *experts])
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            parameter.data.normal_(0, 0.05)
    return found


def stored_names(model: CausalLM) -> set[str]:
    """The names of the weights that stay as they are stored."""
    named = model.named_parameters()
    return {name for name, parameter in named if isinstance(parameter, StoredWeight)}


@pytest.mark.parametrize(("layout", "model"), some(3, RELEASES))
@torch.no_grad()
def test_values_are_those_that_the_release_means(layout: str, model: str, tmp_path: Path) -> None:
    judge = publish(tmp_path / "m", layout, model)
    stored = load(tmp_path / "m", "stored")
    dense = load(tmp_path / "m", "dequantized")
    names = stored_names(stored)
    linears = 2 if layout == "mxfp4" else 4
    count = 2 * (2 + 3 * 2 if model == "qwen3_moe" else 3 * 2 if layout == "mxfp4" else linears)
    assert len(names) == count and not stored_names(dense)
    wanted = dict(dense.named_parameters())
    for name, parameter in stored.named_parameters():
        assert parameter.shape == wanted[name].shape
        assert torch.equal(plain(parameter), wanted[name]), name
        assert parameter.requires_grad == (name not in names)
    ours = stored(IDS).logits
    assert torch.equal(ours, dense(IDS).logits)
    ours = load(tmp_path / "m", "stored", dtype=torch.float32)(IDS).logits
    torch.testing.assert_close(ours, judge(IDS).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("release", "recipe"),
    every(6, [r for r in RELEASES if r[0] in ("mxfp4", "nvfp4", "fp8-block")], RECIPES),
)
def test_training_has_the_bits_of_the_dequantized_base(
    release: tuple[str, str], recipe: str, tmp_path: Path
) -> None:
    publish(tmp_path / "m", *release)
    results = []
    for base_weights in ("stored", "dequantized"):
        model = load(tmp_path / "m", base_weights, recipe)
        trained = adapted(model)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        found: list[Tensor] = []
        for step in range(3):
            embedded = model.embed_tokens(IDS).detach().requires_grad_()
            output = trained(None, inputs_embeds=embedded, labels=IDS)
            output.loss.backward()
            assert embedded.grad is not None
            found += [output.loss.detach(), output.logits.detach(), embedded.grad]
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
        results.append([*found, *(p.detach() for p in parameters)])
    for ours, wanted in zip(*results, strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize(("mode", "offload"), every(3, ["selective", "full"], [True, False]))
def test_recompute_and_offload_change_no_bit(mode: str, offload: bool, tmp_path: Path) -> None:
    publish(tmp_path / "m", "mxfp4", "gpt_oss")
    results = []
    for options in ({}, dict(activation_checkpointing=mode, activation_offload=offload)):
        model = load(tmp_path / "m", "stored", "delayed", **options)
        trained = adapted(model)
        for _ in range(2):
            loss = trained(IDS, labels=IDS).loss
            loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
    for ours, wanted in zip(*results, strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize(
    ("release", "recipe"),
    every(2, [("mxfp4", "gpt_oss"), ("fp8-block", "qwen3")], ["bf16", "delayed"]),
)
def test_no_more_than_one_weight_is_dequantized_at_a_time(
    release: tuple[str, str], recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "m", *release)
    model = load(tmp_path / "m", "stored", recipe)
    trained = adapted(model)
    made: list[Any] = []
    most = 0
    dequantize = StoredRows.dequantize

    def noted(self: StoredRows, *args: Any, **options: Any) -> Tensor:
        nonlocal most
        values = dequantize(self, *args, **options)
        made.append(weakref.ref(values))
        most = max(most, sum(one() is not None for one in made))
        return values

    monkeypatch.setattr(StoredRows, "dequantize", noted)
    loss = trained(IDS, labels=IDS, is_first_microbatch=True).loss
    assert not any(one() is not None for one in made) and not any(
        module._fp8_workspaces
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", getattr(module, "weight0", None)), StoredWeight)
        and hasattr(module, "_fp8_workspaces")
    )
    loss.backward()
    # A forward and a backward of each weight, but the input of the first layer needs no gradient.
    assert len(made) > len(stored_names(model)) and most == 1


def test_a_linear_may_have_rows_that_are_not_quantized(tmp_path: Path) -> None:
    publish(tmp_path / "m", "nvfp4", plain=("v_proj", "layers.1.mlp.down"))
    stored = load(tmp_path / "m", "stored")
    dense = load(tmp_path / "m", "dequantized")
    names = stored_names(stored)
    assert "layers.0.self_attn.qkvg_proj.weight" in names
    assert "layers.1.mlp.down_proj.weight" not in names
    for name, parameter in stored.named_parameters():
        assert torch.equal(plain(parameter), dense.get_parameter(name))


@pytest.mark.parametrize(
    "release", every(2, [("mxfp4", "gpt_oss"), ("modelopt-nvfp4", "qwen3_moe")])
)
def test_adapters_load_in_peft_on_the_dequantized_model(
    release: tuple[str, str], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    judge = publish(tmp_path / "m", *release)
    model = load(tmp_path / "m", "stored")
    trained = adapted(model)
    save_lora(trained, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(judge, tmp_path / "adapter").eval()
    ours = load_lora(load(tmp_path / "m", "stored", dtype=torch.float32), tmp_path / "adapter")
    with torch.no_grad():
        found = ours(IDS).logits
        wanted = theirs(IDS).logits
        with theirs.disable_adapter():
            change = (wanted - theirs(IDS).logits).abs().max()
    assert change > 0.1
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("release", every(2, [("mxfp4", "gpt_oss"), ("nvfp4", "qwen3")]))
def test_merges_have_the_bits_of_the_dequantized_base_and_are_undone(
    release: tuple[str, str], tmp_path: Path
) -> None:
    publish(tmp_path / "m", *release)
    model = load(tmp_path / "m", "stored")
    names = {name.replace(".base_layer", "") for name in stored_names(model)}
    trained = adapted(model)
    before = trained(IDS).logits.detach()
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.merge()
    assert not stored_names(model)
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.unmerge()
    assert {name.replace(".base_layer", "") for name in stored_names(model)} == names
    assert torch.equal(trained(IDS).logits, before)
    merged = trained.merge_and_unload()
    wanted = adapted(load(tmp_path / "m", "dequantized")).merge_and_unload()
    for name, parameter in wanted.named_parameters():
        assert torch.equal(plain(merged.get_parameter(name)), parameter), name
    merged.save_pretrained(tmp_path / "merged")
    again = CausalLM.from_pretrained(tmp_path / "merged", device="cpu")
    assert torch.equal(again(IDS).logits, wanted(IDS).logits)


def test_an_export_gives_the_base_back_unchanged_with_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(tmp_path / "m", "mxfp4", "gpt_oss")
    model = load(tmp_path / "m", "stored")
    trained = adapted(model)
    trained.peft_config["default"].base_model_name_or_path = str(tmp_path / "m")
    wanted = trained(IDS).logits.detach()
    with pytest.raises(UsageError, match="save_lora first"):
        model.export(tmp_path / "out", format="stored")
    save_lora(trained, tmp_path / "adapter")
    out = tmp_path / "out"
    words = ["--model", str(tmp_path / "adapter"), "--format", "stored", "--out", str(out)]
    assert main(["export", *words]) == 0
    assert "unchanged" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "m").iterdir()}
    assert names == {path.name for path in out.iterdir() if path.is_file()}
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "m" / name).read_bytes()
    again = load_lora(load(out, "stored"), out / "adapter")
    assert torch.equal(again(IDS).logits, wanted)
    result = CausalLM.from_pretrained(tmp_path / "adapter", device="cpu").export(
        tmp_path / "second", format="stored"
    )
    assert (result.folder / "adapter/adapter_model.safetensors").is_file()
    assert main(["export", *words]) == 2 and "new or empty" in capsys.readouterr().err
    assert main(["export", "--model", str(tmp_path / "m"), "--format", "stored", "--out", "x"]) == 2
    assert "with --lora" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("preset", "form", "most"),
    [
        ("gpt-oss-120b", "mxfp4", 72),
        pytest.param("qwen3.6-35b-a3b", "nvfp4", 30, marks=pytest.mark.slow),
    ],
)
def test_large_shapes_fit_on_one_h100(preset: str, form: str, most: float, any_batch: None) -> None:
    """With adapters on every expert and 4,096 tokens; the weights alone have the size of the releases' files."""
    plan = plan_memory(
        get_preset(preset),
        get_recipe("bf16"),
        base_weights=form,
        lora_rank=8,
        lora_experts=True,
        batch_size=1,
        seq_len=4096,
        optimizer="adamw8bit",
        activation_checkpointing="full",
    )
    assert plan.fits(80) and plan.peak.total < most * 2**30
    # Four bits, and a scale for 32 or 16 of them: 0.53 and 0.56 bytes, beside tables and linears that stay BF16.
    per_parameter = plan.peak.weights / get_preset(preset).num_parameters
    assert 0.53 < per_parameter < 0.70
    assert "as they are stored" in str(plan)


@pytest.mark.slow
def test_a_run_resumes_and_its_folder_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(tmp_path / "m", "mxfp4", "gpt_oss")
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("Ten green bottles, hanging on the wall.\n" * 60)
    data = ["--data", "text.txt", "--seq-len", "32", "--device", "cpu"]
    line = "finetune --model m --batch-size 2 --sample-tokens 4 --lora 4 --recipe delayed --steps"
    line = [*line.split(), "4", "--lora-targets", "all-linear,experts", *data]
    line += [f"--{name.replace('_', '-')}={value}" for name, value in INSIDE.items()]
    for name in ("dequantized", "stored"):
        assert main([*line, "--base-weights", name, "--out", name]) == 0
    suggested = capsys.readouterr().out.splitlines()[-1].partition("#")[0].split()
    assert suggested[:2] == ["te-models", "export"] and suggested[-2:] == ["--format", "stored"]
    assert main(suggested[1:]) == 0
    adapters = [
        load_file(f"{name}/adapter/adapter_model.safetensors") for name in ("stored", "dequantized")
    ]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    short = [*line, "--base-weights", "stored", "--out", "short"]
    short[short.index("--steps") + 1] = "2"
    assert main(short) == 0
    assert main(["finetune", "--resume", "short", "--steps", "4"]) == 0
    run = CausalLM.from_pretrained("stored", device="cpu")
    assert stored_names(run)
    whole = CausalLM.from_pretrained("stored", device="cpu", merge_adapters=True)
    assert not stored_names(whole) and not whole.stored_linears
    assert json.loads(Path("stored/adapter/run.json").read_text())["base_weights"] == "stored"
    assert main(["evaluate", "--model", "stored", *data]) == 0
    assert (
        main(
            [
                "generate",
                "--model",
                "stored",
                "--prompt",
                "Ten",
                "--max-new-tokens",
                "3",
                "--device",
                "cpu",
            ]
        )
        == 0
    )
    capsys.readouterr()


def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path) -> None:
    publish(tmp_path / "m", "mxfp4", "gpt_oss")
    publish(tmp_path / "dense", "fp8-tensor", plain=("_proj",))
    folder = tmp_path / "m"
    with pytest.raises(UsageError, match="no quantized weights that can stay"):
        load(tmp_path / "dense", "stored")
    with pytest.raises(UsageError, match="base_weights"):
        load(folder, "packed")
    with pytest.raises(UsageError, match="leave one of them out"):
        load(folder, "stored", "current", fp8_params=True)
    model = load(folder, "stored")
    with pytest.raises(UsageError, match="train adapters"):
        tiny_trainer(model, tmp_path / "run", None)
    with pytest.raises(UsageError, match="cannot be changed"):
        model.layers[0].mlp.gate_up_proj.weight0.data.zero_()
    with pytest.raises(UsageError, match="cannot be changed"):
        model.to(torch.float32)
    shared = Parallel(kind="fsdp")
    with pytest.raises(UsageError, match="--parallel ddp"):
        CausalLM.from_pretrained(folder, build=shared.build, base_weights="stored", device="cpu")
    with pytest.raises(UsageError, match="lora_rank"):
        plan_memory(model.config, model.recipe, base_weights="mxfp4", seq_len=32)


@pytest.mark.parametrize("damage", ["data", "scales"])
def test_values_that_are_not_finite_are_refused(damage: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415

    publish(tmp_path / "m", "fp8-block" if damage == "data" else "mxfp4",
            "qwen3" if damage == "data" else "gpt_oss")  # fmt: skip
    file = tmp_path / "m/model.safetensors"
    tensors = load_file(file)
    if damage == "data":
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name].view(torch.uint8)[3, 5] = 0xFF
    else:
        tensors["model.layers.1.mlp.experts.down_proj_scales"][1, 2, 0] = 255
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="layers.1.mlp.*not finite"):
        load(tmp_path / "m", "stored")


@pytest.mark.parametrize(("layout", "model"), some(4, RELEASES))
def test_the_plan_counts_the_bytes_that_there_are(layout: str, model: str, tmp_path: Path) -> None:
    publish(tmp_path / "m", layout, model)
    stored = load(tmp_path / "m", "stored")
    memory: dict[int, int] = {}
    for parameter in stored.parameters():
        parts = parameter.rows.tensors if isinstance(parameter, StoredWeight) else [parameter]
        for part in parts:
            storage = part.untyped_storage()
            memory[storage.data_ptr()] = storage.nbytes()
    there = sum(memory.values())
    from_folder = StoredBase.in_folder(stored_storages(CausalLM, tmp_path / "m"))
    for base in (from_folder, None):
        options: dict[str, Any] = dict(lora_rank=1, batch_size=1, seq_len=32, optimizer=None)
        if base is None:
            plan = stored.plan_memory(**options)
        else:
            plan = plan_memory(stored.config, stored.recipe, base_weights=base, **options)
        adapters = sum(p.numel() * 2 for p in adapted(copy.deepcopy(stored), 1).parameters()
                       if p.requires_grad)  # fmt: skip
        experts = 0
        if stored.config.moe:  # adapters of experts are not counted without lora_experts
            experts = adapters
            adapters = 0
        found = plan.peak.weights
        assert abs(found - there - adapters) <= 0.03 * there + experts


def test_parts_of_one_form_are_joined_where_they_are() -> None:
    rows = StoredRows(
        torch.randint(0, 256, (12, 8), dtype=torch.uint8), torch.rand(12, 1), 16, True
    )
    parts = [rows.part(0, 4), rows.part(4, 8), rows.part(8, 12)]
    assert joined(parts[:2]).data.data_ptr() == rows.data.data_ptr()
    apart = [part.mapped(torch.clone) for part in parts]
    assert joined(apart).data.data_ptr() != apart[0].data.data_ptr()
    for found in (joined(parts), joined(apart)):
        assert torch.equal(found.dequantize(torch.float32), rows.dequantize(torch.float32))
    blocks = StoredRows(torch.zeros(6, 8, dtype=torch.uint8) + 0x39, torch.rand(3, 1), 8, False,
                        scale_rows=torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.int32))  # fmt: skip
    others = [blocks, blocks.mapped(lambda t: t.clone())]
    both = joined(others).dequantize(torch.float32)
    assert torch.equal(both[:6], both[6:]) and torch.equal(
        both[:6], blocks.dequantize(torch.float32)
    )


def test_copies_and_pickles_keep_the_form(tmp_path: Path) -> None:
    publish(tmp_path / "m", "nvfp4")
    model = load(tmp_path / "m", "stored")
    copied = copy.deepcopy(model)
    assert stored_names(copied) == stored_names(model)
    assert torch.equal(copied(IDS).logits, model(IDS).logits)
    file = io.BytesIO()
    torch.save(model.layers[0].mlp.down_proj.weight, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert isinstance(again, torch.nn.Parameter) and isinstance(again, StoredWeight)
    assert torch.equal(again.dequantize(), plain(model.layers[0].mlp.down_proj.weight))
    assert SKETCH["device"] == "meta" and set(LAYOUTS) >= {"nvfp4"}


@pytest.mark.parametrize("command", ["export", "parity"])
def test_a_release_that_is_read_twice_has_one_notice(
    command: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its second reading tells how much of the tuning an export leaves."""
    publish(tmp_path / "release", "mxfp4", "gpt_oss")
    adapted_model = load(tmp_path / "release", base_weights="dequantized")
    save_lora(add_lora(adapted_model, r=2, target_modules=["o_proj"]), tmp_path / "adapter")
    texts = tmp_path / "texts.txt"
    texts.write_text("ab" * 200)
    caplog.clear()
    options = dict(
        export=["--format", "bf16", "--out", str(tmp_path / "served")],
        parity=["--export", "bf16", "--data", str(texts), "--batches", "1"],
    )
    assert main([command, "--model", str(tmp_path / "adapter"), *options[command]]) == 0
    assert caplog.text.count("its experts are MXFP4, and are read as BF16") == 1
