"""Load a Hugging Face model into te.Linear blocks under a precision recipe, print its plan, and save it for
transformers.

python examples/load_hf.py Qwen/Qwen3-0.6B --recipe current
python examples/load_hf.py path/to/Llama-3.2-1B --recipe mxfp8 --engine emulated --out llama-again
python examples/load_hf.py Qwen/Qwen3-0.6B --attention-gate elementwise --out gated    # a gate that changes no output
yet
"""

import argparse
import time

import torch

from te_models import CausalLM


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("model", help="a folder, or a name on the Hugging Face hub")
    options.add_argument(
        "--recipe", default="auto", help="bf16, delayed, current, ..., FILE.toml, or auto"
    )
    options.add_argument("--engine", default="auto", help="auto, native or emulated")
    options.add_argument(
        "--attention-gate", help="elementwise or headwise: for a model that has no gate"
    )
    options.add_argument("--out", help="save it here, for transformers")
    arguments = options.parse_args()

    gate = {"attention_gate": arguments.attention_gate} if arguments.attention_gate else {}
    start = time.perf_counter()
    model = CausalLM.from_pretrained(
        arguments.model,
        recipe=arguments.recipe,
        engine=arguments.engine,
        dtype=torch.bfloat16,
        **gate,
    )
    print(
        f"{model.config.num_parameters:,} parameters on {model.device} in {time.perf_counter() - start:.1f} s"
    )
    print(model.plan())

    ids = torch.arange(16).unsqueeze(0) % model.config.vocab_size
    with torch.no_grad():
        logits = model.eval()(ids.to(model.device)).logits
    print(
        f"logits {list(logits.shape)}, mean {logits.float().mean():.4f}, std {logits.float().std():.4f}"
    )

    if arguments.out:
        model.save_pretrained(arguments.out, format="hf")
        print(f"saved for transformers in {arguments.out}")


if __name__ == "__main__":
    main()
