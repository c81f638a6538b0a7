"""Train a gated model in FP8 from random weights in a few lines: the public API from data to a sample.

python examples/pretrain.py                         # two CPU cores: less than a minute
python examples/pretrain.py --recipe mxfp8 --steps 50 --data my_texts/
python examples/pretrain.py --preset gated-124m --recipe delayed --batch-size 32 --seq-len 1024   # on an H200
"""

import argparse
from pathlib import Path

import torch

from te_models import CausalLM, TrainConfig, Trainer, load_tokenizer, open_data


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--preset", default="gated-nano")
    options.add_argument(
        "--recipe",
        default="current",
        help="bf16, delayed, current, blockwise, mxfp8, nvfp4, FILE.toml",
    )
    options.add_argument(
        "--data", help="file, folder, glob, URL or Hub dataset; default: Python's docs"
    )
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--batch-size", type=int, default=8)
    options.add_argument("--seq-len", type=int, default=256)
    options.add_argument("--out", default="runs/pretrain-example")
    arguments = options.parse_args()

    config = TrainConfig(
        steps=arguments.steps, batch_size=arguments.batch_size, seq_len=arguments.seq_len
    )
    tokenizer = load_tokenizer()
    dataset, evaluation = open_data(arguments.data, tokenizer, config)

    torch.manual_seed(config.seed)
    model = CausalLM.from_preset(arguments.preset, recipe=arguments.recipe)
    print(model.plan())

    trainer = Trainer(
        model, dataset, evaluation, config, Path(arguments.out), documents=tokenizer.documents()
    )
    trainer.on_step = lambda row: print(
        f"step {row['step']:4d}  loss {row['loss']:.4f}", end="\r", flush=True
    )
    result = trainer.run()
    print(
        f"\neval loss {result.first_eval_loss:.4f} -> {result.eval_loss:.4f}; saved in {result.checkpoint}"
    )

    prompt = torch.tensor([tokenizer.encode("import ")])
    sample = model.generate(prompt, max_new_tokens=100, do_sample=True, temperature=0.8, seed=0)
    print(tokenizer.decode(sample[0].tolist()))


if __name__ == "__main__":
    main()
