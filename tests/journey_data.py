"""Inputs of journeys: records made of this package's sources, and models of other families.

    python tests/journey_data.py gemma2 FOLDER   # a random model, as transformers saves it

Options: --tiny makes it small enough for a CPU.
"""

import csv
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "te_models/pretrained/gated-nano"
HEADED = re.compile(r'^ *def (\w+)\((.*)\).*:\n +"""(.+?)(?:""")?$', re.MULTILINE)
SIZES: dict[str, Any] = dict(
    hidden_size=512, intermediate_size=1408, num_attention_heads=8, num_key_value_heads=4
)
TINY: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=2
)
IDS: dict[str, Any] = dict(vocab_size=4096, bos_token_id=None, eos_token_id=None, pad_token_id=None)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(head_dim=64),
    "qwen3": dict(head_dim=128),  # a norm of each head
    "gemma2": dict(
        head_dim=128, query_pre_attn_scalar=128, sliding_window=256
    ),  # softcaps, GELU, four norms
    "phi3": {},  # fused rows; its head_dim is 64
    "olmo2": {},  # norms of outputs, and of q and k over all heads
}


def write_records(folder: Path) -> None:
    """Write texts.jsonl, chats.jsonl and pairs.csv."""
    texts = [file.read_text() for file in sorted((ROOT / "te_models").rglob("*.py"))]
    parts = [text[first : first + 2000] for text in texts for first in range(0, len(text), 2000)]
    lines = [dict(text=part) for part in parts]
    (folder / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pairs = [
        (f"What does {name}({given}) do?", said)
        for text in texts
        for name, given, said in HEADED.findall(text)
    ]
    turns = [
        [dict(role="user", content=ask), dict(role="assistant", content=said)]
        for ask, said in pairs
    ]
    chats = [
        dict(messages=one + other) for one, other in zip(turns[::2], turns[1::2], strict=False)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    with (folder / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("prompt", "completion"), *pairs])


def write_model(family: str, folder: str, tiny: bool) -> None:
    """Save a random model of a family by transformers, with the tokenizer of the model that ships."""
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    sizes = {**IDS, **(TINY if tiny else SIZES | FAMILIES[family]), "num_hidden_layers": 4}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **sizes, max_position_embeddings=1024)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, folder)


if __name__ == "__main__":
    write_model(sys.argv[1], sys.argv[2], "--tiny" in sys.argv)
