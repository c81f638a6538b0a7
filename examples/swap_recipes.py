"""Run the same weights under every recipe and print how far its logits are from those of FP32.

python examples/swap_recipes.py Qwen/Qwen3-0.6B
python examples/swap_recipes.py runs/mine --engine emulated     # every recipe, on any machine
"""

import argparse

import torch

from te_models import CausalLM, list_recipes


def sqnr_db(reference: torch.Tensor, got: torch.Tensor) -> float:
    """Signal-to-quantization-noise ratio in decibels; higher is closer, 6 dB is one bit."""
    return (20 * torch.log10(reference.norm() / (reference - got).norm())).item()


@torch.no_grad()
def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", help="a folder, or a name on the Hugging Face hub")
    options.add_argument("--engine", default="auto", help="auto, native or emulated")
    options.add_argument("--seq-len", type=int, default=128)
    arguments = options.parse_args()

    def load(dtype: torch.dtype) -> CausalLM:
        return CausalLM.from_pretrained(arguments.model, recipe="bf16", engine=arguments.engine, dtype=dtype).eval()

    torch.manual_seed(0)
    model = load(torch.float32)
    ids = torch.randint(0, model.config.vocab_size, (1, arguments.seq_len), device=model.device)
    reference = model(ids).logits.double()
    model = load(torch.bfloat16)

    print(f"{'recipe':12}{'SQNR, dB':>10}{'largest difference':>22}{'same next token':>18}")
    for recipe in list_recipes():
        try:
            model.set_recipe(recipe)
        except ValueError as reason:
            print(f"{recipe:12}  {reason}")
            continue
        logits = model(ids).logits.double()
        same = (logits.argmax(-1) == reference.argmax(-1)).double().mean().item()
        largest = (logits - reference).abs().max().item()
        print(f"{recipe:12}{sqnr_db(reference, logits):>10.1f}{largest:>22.4f}{same:>17.1%}")


if __name__ == "__main__":
    main()
