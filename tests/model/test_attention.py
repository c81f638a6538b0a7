"""Attention in a model: masks of documents, and one operation where kernels compute all that it asks for."""

from kinds import KINDS, OPTIONS, build

from te_models import CausalLM


def test_the_plan_says_what_fused_kernels_do_not_compute() -> None:
    notes = {name: " ".join(build(KINDS[name]).plan().notes) for name in OPTIONS}
    assert not [name for name, note in notes.items() if "attention" in note]
    assert not notes["Gemma 2"] and not notes["AFM"]
    assert notes["LayerNorms"].startswith("norms: separate kernels")
    assert "mlp_bias" in notes["biases"] and not notes["Granite"]
    assert notes["Gemma 2"].split(":")[0] in str(build(KINDS["Gemma 2"]).plan())
    plain = CausalLM.from_preset("gated-nano", device="meta", engine="emulated")
    assert plain.plan().notes == () and "separate" not in str(plain.plan())
