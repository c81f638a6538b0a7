"""Preference tuning with TRL: DPOTrainer makes chosen answers likelier than rejected ones.

pip install "trl>=1.10" "te-models[hf,datasets]"

python examples/preferences_trl.py --model Qwen/Qwen3-0.6B --data preferences.jsonl --out runs/dpo

Each line of the data is {"prompt": ..., "chosen": ..., "rejected": ...}, texts or lists of messages.
"""

import argparse
from typing import cast

from te_models import TEModelsForCausalLM

try:
    from datasets import load_dataset
    from transformers import AutoTokenizer, PreTrainedTokenizerBase
    from trl import DPOConfig, DPOTrainer
except ImportError as error:
    raise SystemExit(f'{error}: pip install "trl>=1.10" "te-models[hf,datasets]"') from None


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--model", required=True, help="a folder, or a name on the hub")
    options.add_argument("--data", required=True, help="JSONL")
    options.add_argument("--recipe", default="current")
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--batch-size", type=int, default=8)
    options.add_argument("--learning-rate", type=float, default=1e-6)
    options.add_argument("--out", default="runs/dpo")
    arguments = options.parse_args()

    model = TEModelsForCausalLM.from_pretrained(
        arguments.model, recipe=arguments.recipe, dtype="bfloat16"
    )
    reference = TEModelsForCausalLM.from_pretrained(
        arguments.model, recipe=arguments.recipe, dtype="bfloat16"
    )
    tokenizer = cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(arguments.model))
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    config = DPOConfig(
        arguments.out,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        logging_steps=1,
        report_to=[],
        use_cpu=model.device.type == "cpu",
        bf16=False,  # the recipe decides the precision
    )
    rows = load_dataset("json", data_files=arguments.data, split="train")
    trainer = DPOTrainer(model, reference, config, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    for row in trainer.state.log_history:
        if "rewards/accuracies" in row:
            print(
                f"step {row['step']}  loss {row['loss']:.4f}  chosen preferred {row['rewards/accuracies']:.2f}"
            )
    trainer.save_model(arguments.out)


if __name__ == "__main__":
    main()
