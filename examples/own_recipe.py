"""A recipe file of your own: blockwise scaling with more layers in BF16, used by its path.

python examples/own_recipe.py --out runs/own_recipe
"""

import argparse
from pathlib import Path

from te_models import CausalLM, TrainConfig, Trainer, load_tokenizer, open_data

RECIPE = """\
description = "blocks of 128, and two layers in BF16 at each end"
scheme = "Float8BlockScaling"
num_layers_at_start_in_bf16 = 2
num_layers_at_end_in_bf16 = 2
"""


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--preset", default="gated-nano")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--out", default="runs/own_recipe")
    arguments = options.parse_args()

    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    recipe = out / "mine.toml"
    recipe.write_text(RECIPE)

    tokenizer = load_tokenizer()  # bytes
    config = TrainConfig(steps=arguments.steps, seq_len=128, batch_size=2, eval_batches=2)
    dataset, evaluation = open_data("python-docstrings", tokenizer, config)
    model = CausalLM.from_preset(arguments.preset, recipe=str(recipe))
    print(model.plan())
    result = Trainer(
        model, dataset, evaluation, config, out / "run", documents=tokenizer.documents()
    ).run()
    print(
        f"held-out loss {result.first_eval_loss:.3f} before, {result.eval_loss:.3f} after {result.step} steps"
    )


if __name__ == "__main__":
    main()
