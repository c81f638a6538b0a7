"""Write a model for a server in FP8, and measure how far its probabilities are from the trained model's.

python examples/export_and_parity.py --model gated-nano --format fp8-channel --out served
"""

import argparse

from te_models import CausalLM, TrainConfig, load_tokenizer, open_data, parity


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--model", default="gated-nano", help="a folder, or a name on the hub")
    options.add_argument(
        "--data", default="python-docstrings", help="text or records to compare on"
    )
    options.add_argument(
        "--format", default="fp8-channel", help="one of those in `te-models export --help`"
    )
    options.add_argument("--out", default="served")
    arguments = options.parse_args()

    model = CausalLM.from_pretrained(arguments.model, recipe="bf16")
    config = TrainConfig(seq_len=128, batch_size=2, eval_batches=2)
    _, batches = open_data(arguments.data, load_tokenizer(arguments.model), config)

    written = model.export(arguments.out, format=arguments.format)
    print(
        f"{arguments.out}: {len(written.quantized)} linears quantized, {len(written.ignored)} not"
    )
    print(parity(model, model.origin, [arguments.out], batches))


if __name__ == "__main__":
    main()
