"""Change the recipe in the middle of a run: BF16 first, then FP8, with a callback and `set_recipe`.

python examples/swap_recipes.py                                             # the model that ships with te-models
python examples/swap_recipes.py --recipes bf16,delayed,mxfp8,nvfp4 --every 10 --preset gated-nano
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from te_models import Callback, CausalLM, TrainConfig, Trainer, load_tokenizer, open_data


class SwapRecipes(Callback):
    """Switch to the next recipe every `every` steps. Weights, optimizer state and data position are unaffected."""

    def __init__(self, recipes: list[str], every: int) -> None:
        self.left, self.every = recipes[1:], every

    def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
        print(f"step {row['step']:4d}  loss {row['loss']:.4f}  {trainer.model.recipe.name}")
        if row["step"] % self.every == 0 and self.left:
            trainer.model.set_recipe(self.left.pop(0))


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--model", default="gated-nano", help="a folder, a name on the Hub, or a shipped model"
    )
    options.add_argument("--preset", help="train this shape from random weights instead of --model")
    options.add_argument(
        "--data", help="file, folder, glob, URL or Hub dataset; default: Python's docs"
    )
    options.add_argument(
        "--recipes", default="bf16,delayed,current", help="names or .toml files, in this order"
    )
    options.add_argument("--every", type=int, default=5, help="steps under each recipe")
    options.add_argument("--batch-size", type=int, default=4)
    options.add_argument("--seq-len", type=int, default=128)
    options.add_argument("--out", default="runs/swap-example")
    arguments = options.parse_args()

    recipes = arguments.recipes.split(",")
    steps = arguments.every * len(recipes)
    config = TrainConfig(
        steps=steps, batch_size=arguments.batch_size, seq_len=arguments.seq_len, learning_rate=1e-4
    )
    tokenizer = load_tokenizer(None if arguments.preset else arguments.model)
    dataset, evaluation = open_data(arguments.data, tokenizer, config)
    torch.manual_seed(config.seed)
    load = CausalLM.from_preset if arguments.preset else CausalLM.from_pretrained
    model = load(arguments.preset or arguments.model, recipe=recipes[0])

    trainer = Trainer(
        model, dataset, evaluation, config, Path(arguments.out), documents=tokenizer.documents()
    )
    trainer.callbacks = [SwapRecipes(recipes, arguments.every)]
    result = trainer.run()
    print(
        f"eval loss {result.first_eval_loss:.4f} -> {result.eval_loss:.4f} under {model.recipe.name}"
    )


if __name__ == "__main__":
    main()
