"""Generate with a loaded model: a batch of unequal prompts, then one answer while it is generated, under any recipe.

python examples/generate.py Qwen/Qwen3-0.6B --recipe current
python examples/generate.py runs/mine --prompt "def main" --prompt "import "
python examples/generate.py Qwen/Qwen3-0.6B --chat --prompt "Why is the sky blue?"
"""

import argparse

from te_models import CausalLM, load_tokenizer, stream_text


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("model", help="a folder, or a name on the Hugging Face hub")
    options.add_argument("--prompt", action="append", help="may be given several times")
    options.add_argument(
        "--recipe", default="auto", help="bf16, delayed, current, ..., FILE.toml, or auto"
    )
    options.add_argument(
        "--chat", action="store_true", help="apply the tokenizer's chat template to each prompt"
    )
    options.add_argument("--max-new-tokens", type=int, default=64)
    arguments = options.parse_args()

    tokenizer = load_tokenizer(arguments.model)
    model = CausalLM.from_pretrained(arguments.model, recipe=arguments.recipe)
    texts = arguments.prompt or ["The capital of France is", "def fibonacci(n):"]
    prompts = [tokenizer.encode_prompt(text) for text in texts]
    if arguments.chat:
        prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts
        ]

    out = model.generate(prompts, max_new_tokens=arguments.max_new_tokens)
    longest = max(map(len, prompts))
    for text, row in zip(texts, out, strict=True):
        print(f"{text!r} -> {tokenizer.decode(row[longest:].tolist())!r}")

    print(f"\nsampled: {texts[0]}", end="")
    sampled = stream_text(
        model,
        tokenizer,
        prompts[0],
        arguments.max_new_tokens,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        seed=0,
    )
    for piece in sampled:
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
