"""Train low-rank adapters on a frozen FP8 model with peft, merge them and save the result for transformers.

python examples/finetune_lora.py                           # the model that ships with te-models
python examples/finetune_lora.py --model Qwen/Qwen3-0.6B --data my_texts/ --targets q_proj,v_proj --out tuned
"""

import argparse

import torch

from te_models import CausalLM, TrainConfig, add_lora, load_tokenizer, open_data, save_lora


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--model", default="gated-nano", help="a folder, a name on the Hub, or a shipped model"
    )
    options.add_argument(
        "--data", help="file, folder, glob, URL or Hub dataset; default: Python's docs"
    )
    options.add_argument(
        "--recipe",
        default="current",
        help="bf16, delayed, current, blockwise, mxfp8, nvfp4, FILE.toml",
    )
    options.add_argument("--rank", type=int, default=8)
    options.add_argument(
        "--targets", default="", help="modules with adapters; default: all linears of every block"
    )
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--seq-len", type=int, default=128)
    options.add_argument("--batch-size", type=int, default=4)
    options.add_argument("--out", default="runs/lora-example")
    arguments = options.parse_args()

    torch.manual_seed(0)
    tokenizer = load_tokenizer(arguments.model)
    config = TrainConfig(
        steps=arguments.steps, batch_size=arguments.batch_size, seq_len=arguments.seq_len
    )
    data, _ = open_data(arguments.data, tokenizer, config)
    model = CausalLM.from_pretrained(arguments.model, recipe=arguments.recipe)

    targets = {"target_modules": arguments.targets.split(",")} if arguments.targets else {}
    adapted = add_lora(model, r=arguments.rank, lora_alpha=2 * arguments.rank, **targets)
    adapted.print_trainable_parameters()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-3)
    for step, batch in zip(range(1, config.steps + 1), data, strict=False):
        loss = adapted(**{name: tensor.to(model.device) for name, tensor in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step:4d}  loss {loss.item():.4f}")

    save_lora(
        adapted, f"{arguments.out}/adapter"
    )  # in peft's files, with the names of transformers
    adapted.merge_and_unload().save_pretrained(f"{arguments.out}/merged", format="hf")
    tokenizer.save(
        f"{arguments.out}/merged"
    )  # with the chat template that conversations were put into
    print(f"adapter and merged model in {arguments.out}")


if __name__ == "__main__":
    main()
