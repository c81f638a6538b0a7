"""Muse-Glimmer's text model: transformers has no head for text alone, so its whole model and its published sizes judge.

A small model is compared in test_hf_nested.py.
"""

import torch
from judge import transformers

from te_models import get_preset
from te_models.interop.hf_families import family_of


def test_the_preset_has_the_published_sizes() -> None:
    ropes = dict(rope_parameters=dict(rope_theta=500000.0))
    published = transformers.AutoConfig.for_model("muse_glimmer_text", **ropes)
    document = dict(model_type="muse_glimmer", text_config=published.to_dict())
    preset = get_preset("muse-glimmer-30b")
    assert family_of(document).read(document) == preset
    with torch.device("meta"):
        body = transformers.AutoModel.from_config(published)
    head = published.vocab_size * published.hidden_size
    assert preset.num_parameters == sum(p.numel() for p in body.parameters()) + head
