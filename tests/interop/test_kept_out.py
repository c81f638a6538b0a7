"""Kinds of models of transformers that are no families: docs/reference/families.md names each, with the reason."""

import re
from pathlib import Path

from judge import transformers
from transformers.models.auto import modeling_auto

from te_models.interop.hf_families import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.md"
HELD = {family.model_type for family in FAMILIES}
# Other tests register our own kind.
KINDS = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {"te_models"}
# A projection of an attention class that its output is multiplied by.
GATE = re.compile(
    r"self\.(g_proj|gate_proj|q_gate_proj|output_gate) =|query_states, gate = torch\.chunk"
)
CLASS = re.compile(r"^class (\w+)\(.*?(?=^class |\Z)", re.MULTILINE | re.DOTALL)
# NeoMME's attention sees later tokens, and the text of `hy_v4_vl` is that of `hy_v4`.
NO_KIND_OF_ITS_OWN = {"neomme", "hy_v4_vl"}


def gated() -> set[str]:
    """Return the folders of transformers' decoders that have a gate on the output of attention."""
    decoders = KINDS | set(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    found = set()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        if path.parent.name not in decoders | {f"{kind}_text" for kind in decoders}:
            continue
        for source in CLASS.finditer(path.read_text()):
            attention = source[1].endswith("Attention") and "Delta" not in source[1]
            if attention and GATE.search(source[0]):
                found.add(path.parent.name)
    return found - NO_KIND_OF_ITS_OWN


def named() -> tuple[str, set[str]]:
    """Return the page up to its fields, and all kinds that its table of those that stay out names."""
    page = PAGE.read_text().split("## Fields")[0]
    return page, set(re.findall(r"`([\w-]+)`", page.split("These stay out")[1]))


def test_each_kind_of_causal_language_model_is_a_family_or_stays_out_with_a_reason() -> None:
    page, out = named()
    assert out >= KINDS - HELD, sorted(KINDS - HELD - out)
    assert not out & HELD - {"step3p7", "gpt_oss"}, "named as staying out, and a family"
    assert f"{len(KINDS)} kinds of causal language models, of which {len(KINDS & HELD)} are" in page


def test_each_gated_kind_is_a_family_or_stays_out_with_a_reason() -> None:
    page, out = named()
    kinds = gated()
    assert "qwen3_next" in kinds and "beam" in kinds and "llama" not in kinds
    assert kinds - HELD <= out, sorted(kinds - HELD - out)
    assert (
        f"its {len(kinds)} kinds whose attention has a gate on its output, {len(kinds & HELD)} are"
        in page
    )
