"""Tune low-rank adapters on a frozen FP8 model with peft, merge them and give the result to transformers.

python examples/finetune_lora.py Qwen/Qwen3-0.6B --data my_texts/ --recipe current --out tuned
"""

import argparse

import torch

from te_models import CausalLM
from te_models.checkpoint.pretrained import tokenizer_of
from te_models.data.dataset import TokenDataset, check_vocabulary, load_documents
from te_models.data.tokenizer import load_tokenizer
from te_models.training.lora import add_lora


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", help="a folder, or a name on the Hugging Face hub")
    options.add_argument("--data", help="a text, JSONL or Parquet file, or a folder; default: Python's own docs")
    options.add_argument("--recipe", default="current", help="bf16, delayed, current, blockwise, mxfp8 or a .toml file")
    options.add_argument("--rank", type=int, default=8)
    options.add_argument("--steps", type=int, default=50)
    options.add_argument("--seq-len", type=int, default=256)
    options.add_argument("--batch-size", type=int, default=4)
    options.add_argument("--out", default="runs/lora")
    arguments = options.parse_args()

    torch.manual_seed(0)
    tokenizer = load_tokenizer(tokenizer_of(None, arguments.model))
    model = CausalLM.from_pretrained(arguments.model, recipe=arguments.recipe)
    check_vocabulary(tokenizer, model.config.vocab_size)
    data = TokenDataset(
        load_documents(arguments.data), tokenizer, arguments.seq_len, batch_size=arguments.batch_size, seed=0
    )

    adapted = add_lora(model, r=arguments.rank, lora_alpha=2 * arguments.rank)
    adapted.print_trainable_parameters()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-3)
    for step, batch in zip(range(1, arguments.steps + 1), data, strict=False):
        loss = adapted(**{name: tensor.to(model.device) for name, tensor in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step:4d}  loss {loss.item():.4f}")

    adapted.save_pretrained(f"{arguments.out}/adapter")
    adapted.merge_and_unload().save_pretrained(f"{arguments.out}/merged", format="hf")
    print(f"adapter and merged model in {arguments.out}")


if __name__ == "__main__":
    main()
