"""Small random base models as Hugging Face folders, their tokenizers, and conversations to tune them on."""

import json
from pathlib import Path
from typing import Any

import torch

CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_tokenizer(
    template: str | None = None, eos: str = SPECIAL[0], size: int = 320, text: str = ""
) -> Any:
    """Return a byte-level BPE tokenizer of transformers, whose first ids are SPECIAL."""
    import transformers  # noqa: PLC0415  optional
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(
        ["What is 2 + 2? The answer is 4. user assistant" + text] * 9, trainer
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def write_model(
    folder: Path,
    tokenizer: Any = None,
    kind: str = "llama",
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Path:
    """Save a random model of transformers, with its tokenizer; return the folder."""
    import transformers  # noqa: PLC0415  optional

    torch.manual_seed(3)
    usual: dict[str, Any] = dict(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=None,
        initializer_range=0.08,
    )
    config = transformers.CONFIG_MAPPING[kind](**usual | fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(dtype).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def write_chats(file: Path, count: int = 40) -> Path:
    """Write conversations of one question and one answer each as JSONL."""
    lines = []
    for number in range(count):
        question = f"What is {number % 5} + {number % 5}?" + "?" * (number // 5)
        answer = f"The answer is {2 * (number % 5)}."
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}))
    file.write_text("\n".join(lines))
    return file
