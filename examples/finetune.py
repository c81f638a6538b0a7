"""Fine-tune a pretrained model in full: any recipe and any of its fields, recompute, and exact resume.

python examples/finetune.py                                                # the model that ships with te-models
python examples/finetune.py --model Qwen/Qwen3-0.6B --recipe delayed --option amax_history_len=16 --data my_texts/
python examples/finetune.py --recompute full --option num_layers_at_end_in_bf16=2
python examples/finetune.py --steps 40 --resume                            # continue the run in --out
"""

import argparse
import json
from pathlib import Path
from typing import Any

from te_models import CausalLM, TrainConfig, Trainer, load_tokenizer, open_data


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
        help="bf16, delayed, current (the default), blockwise, mxfp8, nvfp4, FILE.toml or auto",
    )
    options.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="a field of the recipe"
    )
    options.add_argument(
        "--recompute", default="none", help="none, selective, full, or N for every N-th block"
    )
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--batch-size", type=int, default=4)
    options.add_argument("--seq-len", type=int, default=128)
    options.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in --out"
    )
    options.add_argument("--out", default="runs/finetune-example")
    arguments = options.parse_args()

    sizes = dict(steps=arguments.steps, batch_size=arguments.batch_size, seq_len=arguments.seq_len)
    config = TrainConfig(learning_rate=2e-5, eval_every=10, save_every=10, **sizes)
    tokenizer = load_tokenizer(arguments.model)
    dataset, evaluation = open_data(arguments.data, tokenizer, config)
    fields: dict[str, Any] = dict(pair.split("=", 1) for pair in arguments.option)
    for name, value in fields.items():
        fields[name] = (
            json.loads(value) if value in ("true", "false") or value.isdecimal() else value
        )
    source, recipe = (
        (arguments.out, "auto") if arguments.resume else (arguments.model, "current")
    )  # auto: its own
    model = CausalLM.from_pretrained(
        source,
        recipe=arguments.recipe or recipe,
        activation_checkpointing=arguments.recompute,
        **fields,
    )
    print(model)

    trainer = Trainer(
        model, dataset, evaluation, config, Path(arguments.out), documents=tokenizer.documents()
    )
    trainer.on_step = lambda row: print(f"step {row['step']:4d}  loss {row['loss']:.4f}")
    result = trainer.run(resume=arguments.resume)
    print(
        f"eval loss {result.first_eval_loss:.4f} -> {result.eval_loss:.4f}; saved in {result.checkpoint}"
    )


if __name__ == "__main__":
    main()
