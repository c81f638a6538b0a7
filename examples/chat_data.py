"""Fine-tune on conversations; show which tokens are answers, and samples before and after.

python examples/chat_data.py    # a small model and its own data: half a minute on two cores
python examples/chat_data.py --model path/to/Qwen3-0.6B --data chats.jsonl --data more.csv:2 --seq-len 2048
"""

import argparse
import itertools
import json
from pathlib import Path

import torch

from te_models import CausalLM, TrainConfig, Trainer, load_tokenizer, open_data, stream_text

COLOURS = {
    "sky": "blue",
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "blood": "red",
    "sun": "yellow",
}


def write_example(path: Path) -> str:
    """Write conversations of two answers each, in the format of OpenAI; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for pair in itertools.permutations(COLOURS, 2):
            messages = []
            for thing in pair:
                messages.append({"role": "user", "content": f"{thing}?"})
                messages.append({"role": "assistant", "content": f"{COLOURS[thing]}."})
            file.write(json.dumps({"messages": messages}) + "\n")
    return str(path)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--model", help="folder or Hub name; default: gated-nano's shape with random weights"
    )
    options.add_argument(
        "--data", action="append", help="PATH or PATH:WEIGHT, may be repeated; default: colours"
    )
    options.add_argument("--recipe", default="current")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--seq-len", type=int, default=192)
    options.add_argument("--out", default="runs/chat")
    arguments = options.parse_args()
    data = arguments.data or [write_example(Path(arguments.out, "colours.jsonl"))]

    rate = 2e-5 if arguments.model else 3e-3
    config = TrainConfig(
        steps=arguments.steps, batch_size=4, seq_len=arguments.seq_len, learning_rate=rate
    )
    tokenizer = load_tokenizer(arguments.model)
    dataset, evaluation = open_data(data, tokenizer, config)
    # Formats, what is left out, padding, and how many tokens the loss counts.
    print(dataset.describe())

    torch.manual_seed(config.seed)
    start = CausalLM.from_pretrained if arguments.model else CausalLM.from_preset
    model = start(arguments.model or "gated-nano", recipe=arguments.recipe)
    prompt = tokenizer.encode_prompt("sky?")
    # The model's template, or the plain one that conversations bring.
    if tokenizer.template_source() is not None:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "sky?"}])
    print("before:", repr("".join(stream_text(model, tokenizer, prompt, 24, do_sample=False))))
    result = Trainer(
        model, dataset, evaluation, config, Path(arguments.out), documents=tokenizer.documents()
    ).run()
    print(
        f"eval loss {result.first_eval_loss:.4f} -> {result.eval_loss:.4f}; saved in {result.checkpoint}"
    )
    print("after:", repr("".join(stream_text(model, tokenizer, prompt, 24, do_sample=False))))


if __name__ == "__main__":
    main()
