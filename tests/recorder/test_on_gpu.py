"""The recorder through Transformer Engine, in a CUDA graph: no bit of training changes, and a CPU replays the step."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from te_models import CausalLM, TrainConfig, Trainer, list_recipes
from te_models.engine import get_engine
from te_models.errors import Diverged
from te_models.inspect.replay import replay
from te_models.recorder.layout import INDEX
from te_models.recorder.record import UNKNOWN, Record, read_record
from te_models.training.captures import Marks, write_marks
from te_models.training.metrics import read_metrics

pytestmark = pytest.mark.gpu
STEPS, MARKED = 8, 7
SHAPE: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4
)
SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=256)


def finished(
    out: Path,
    recipe: str,
    record: int,
    fused: bool,
    graph: bool = True,
    preset: str = "gated-nano",
    **fields: Any,
) -> Trainer:
    """Return the trainer of a finished run, whose last steps were a graph or not, as `graph` says."""
    torch.manual_seed(1)
    history = dict(amax_history_len=8) if recipe == "delayed" else {}
    model = CausalLM.from_preset(
        preset, recipe=recipe, device="cuda", engine="native", fused=fused, **history, **SHAPE
    )
    ids = torch.randint(0, 256, (STEPS + 1, 2, 128), generator=torch.Generator().manual_seed(0))
    batches = [dict(input_ids=part, labels=part) for part in ids]
    config = TrainConfig(
        steps=STEPS, batch_size=2, seq_len=128, eval_every=0, record=record, deterministic=True,
        cuda_graph=graph, **fields
    )  # fmt: skip
    trainer = Trainer(model, batches, None, config, out)
    captured = []

    def note(row: dict[str, Any]) -> None:
        step = trainer.passes.graph  # a run frees its graphs at its end
        captured.append(step is not None and step.captured)

    trainer.on_step = note
    trainer.run()
    assert captured[-1] == graph
    return trainer


def least_sqnr(record: Record) -> np.ndarray[Any, Any]:
    """The SQNR that a cast has at least, in dB, [steps, tensors].

    Rounding changes an element by half a step: relative to it 1/16 in E4M3 and 1/8 in E5M2 at most, and less than half
    a subnormal number where it is smaller than the normal ones. A scale of `delayed` from smaller values clips the
    largest element to largest / (amax * scale) of it, and every other one less.
    """
    e5m2 = record.field("format") == 8
    largest = np.where(e5m2, 57344.0, 448.0)
    rounded = np.where(e5m2, 1 / 8, 1 / 16)
    scale = record.field("scale_min")
    clipped = 1 - largest / np.maximum(record.field("amax") * scale, largest)
    half_subnormal = np.where(e5m2, 2.0**-17, 2.0**-10) / scale
    noise = np.maximum(rounded, clipped) ** 2
    noise += record.field("elements") * half_subnormal**2 / record.field("signal")
    found: np.ndarray[Any, Any] = -10 * np.log10(noise)
    return found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("recipe", [name for name in list_recipes() if name != "nvfp4"])
def test_no_bit_changes_and_a_cpu_replays_the_step(
    recipe: str, fused: bool, tmp_path: Path
) -> None:
    if recipe == "mxfp8" and not get_engine("native")[0].is_mxfp8_available():
        pytest.skip("this GPU does not run MXFP8")
    plain = finished(tmp_path / "plain", recipe, 0, fused)
    write_marks(tmp_path / "recorded", Marks((MARKED,)))
    recorded = finished(tmp_path / "recorded", recipe, 2, fused)
    one, other = (
        [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("plain", "recorded")
    )
    assert one == other
    for a, b in zip(plain.model.parameters(), recorded.model.parameters(), strict=True):
        assert torch.equal(a, b)
    record = read_record(tmp_path / "recorded")
    assert record.steps == [2, 4, 6, MARKED, 8]
    if recipe == "bf16":
        assert not record.counted.any()
        return
    inner = np.array([tensor.layer in (1, 2) for tensor in record.tensors])
    assert record.counted[1:, inner].all()  # the quantizers of most recipes are made in step 1
    exact = record.sqnr()
    known = np.isfinite(exact) & inner
    assert known.any() and (exact[known] > least_sqnr(record)[known]).all()
    found = replay(tmp_path / "recorded", MARKED, twice=False)
    weights = [one for one in found.tensors if one.tensor.operand == "weight"]
    assert weights and all(one.equal for one in weights)
    inputs = [one for one in found.tensors if one.tensor.operand == "input"]
    assert sum(one.within for one in inputs) >= 0.9 * len(inputs)


@pytest.mark.parametrize("preset", ["gated-nano", "gated-moe-nano"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
@pytest.mark.parametrize("every", [1, 2])
def test_every_operand_has_its_values_counted(
    every: int, recipe: str, preset: str, tmp_path: Path
) -> None:
    """SQNR and flushed shares of each linear and expert; but for one that docs/internals/recorder.md names."""
    finished(tmp_path, recipe, every, True, preset=preset)
    record = read_record(tmp_path)
    inner = np.array([tensor.layer in (1, 2) for tensor in record.tensors])
    counted = record.counted & inner
    counted[0] = False  # the quantizers of most recipes are made in step 1
    never_cast = ("mlp.router", "mlp.shared_gate")  # they run in BF16 under every recipe
    dense = np.array(
        [
            tensor.expert is None and not tensor.linear.endswith(never_cast)
            for tensor in record.tensors
        ]
    )
    assert counted[1:, inner & dense].all() and counted[:, inner].any(0).mean() > 0.9
    unknown = set()
    for name in ("zeros", "flushed", "signal", "noise"):
        values = record.values[:, :, INDEX[name]]
        for place in np.flatnonzero((counted & (values == UNKNOWN)).any(0)):
            unknown.add(record.tensors[place].name)
    expected = set()
    if every == 1 and recipe == "current":
        # Transformer Engine's activation is not computed once more where each step is recorded.
        for tensor, here in zip(record.tensors, inner & dense, strict=True):
            if here and tensor.linear.endswith("down_proj") and tensor.operand == "input":
                expected.add(tensor.name)
    assert unknown == expected
    exact = record.sqnr()
    known = counted & np.isfinite(exact)
    if recipe == "blockwise":
        assert (exact[known] > 15).all()
        return
    assert (exact[known] > least_sqnr(record)[known]).all()
    # Kernels that write parts of one tensor note its scale once.
    assert (record.field("blocks")[counted] == 1).all()
    scaled = record.field("scale_min") == record.field("scale_max")
    assert scaled[counted].all()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_graph_and_eager_steps_record_the_same(accumulation: int, tmp_path: Path) -> None:
    records = []
    for graph in (True, False):
        out = tmp_path / f"{graph}"
        finished(out, "delayed", 1, True, graph, gradient_accumulation=accumulation)
        records.append(read_record(out))
    one, other = records
    weights = [tensor.operand == "weight" and tensor.layer in (1, 2) for tensor in one.tensors]
    for record in records:
        # A further micro-batch reuses the weights, so each step casts and counts them once.
        sizes = record.field("elements")[1:, np.array(weights)]
        assert (sizes == sizes[0]).all()
    assert np.array_equal(one.codes, other.codes)
    assert np.allclose(one.field("signal"), other.field("signal"), rtol=1e-5, equal_nan=True)
    for name in ("amax", "scale_min", "elements", "saturated", "flushed", "subnormal"):
        assert np.array_equal(one.field(name), other.field(name), equal_nan=True), name


def test_a_bad_step_is_named_on_a_gpu(tmp_path: Path) -> None:
    """A weight with a NaN, in fused steps under `delayed`: the run ends with the tensor's name."""
    torch.manual_seed(1)
    model = CausalLM.from_preset(
        "gated-nano", recipe="delayed", device="cuda", engine="native", **SHAPE
    )
    ids = torch.randint(0, 256, (2, 128), generator=torch.Generator().manual_seed(0))
    config = TrainConfig(steps=STEPS, batch_size=2, seq_len=128, eval_every=0, record=1)
    trainer = Trainer(model, [dict(input_ids=ids, labels=ids)] * STEPS, None, config, tmp_path)

    def poison(row: dict[str, Any]) -> None:
        if row["step"] == MARKED - 2:
            model.layers[1].mlp.down_proj.weight.data[0, 0] = float("nan")

    trainer.on_step = poison
    with pytest.raises(Diverged, match=r"first bad tensor is layers\.1\.mlp\.down_proj\.weight"):
        trainer.run()
