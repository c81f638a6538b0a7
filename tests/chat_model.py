"""A small chat model as a Hugging Face folder, for the tests that talk to one."""

import json
import warnings
from pathlib import Path

import torch

from te_models import CausalLM
from te_models.data.byte_tokenizer import ByteTokenizer

TEMPLATE = """
{%- if messages[0].role == 'user' and not messages[0].content %}{{ raise_exception('say something') }}{% endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
{% generation %}{{ '<|im_start|>assistant\\n' + message['content'] | trim + '<|im_end|>\\n' }}{% endgeneration %}
    {%- else %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
    {%- endif %}
    {%- if loop.last %}{% break %}{% endif %}
{%- endfor %}
{%- if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}
{%- endif %}"""


def write_chat_model(folder: Path) -> Path:
    """Write a random model of 96 positions whose tokenizer has a chat template and ends a turn with id 258."""
    specials = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
    torch.manual_seed(1)
    shape = dict(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    shape |= dict(num_key_value_heads=2, max_position_embeddings=96, eos_token_id=258)
    model = CausalLM.from_preset(
        "gated-nano", dtype=torch.float32, device="cpu", engine="emulated", **shape
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gated: transformers needs its own code for it
        model.save_pretrained(folder, format="hf")
    document = ByteTokenizer().documents()["tokenizer"]
    document["model"]["vocab"] = {k: v for k, v in document["model"]["vocab"].items() if v < 256}
    document["model"]["vocab"] |= {token: 256 + i for i, token in enumerate(specials)}
    added = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    document["added_tokens"] = [
        dict(id=256 + i, content=token, **added) for i, token in enumerate(specials)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    config = dict(
        bos_token=specials[0],
        eos_token=dict(__type="AddedToken", content=specials[2], **added),
        tokenizer_class="PreTrainedTokenizerFast",
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return folder
