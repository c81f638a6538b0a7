"""Generate with a loaded model: a batch of unequal prompts, then one answer as it is made, in FP8 if you like.

python examples/generate.py Qwen/Qwen3-0.6B --recipe current
python examples/generate.py runs/mine --prompt "def main" --prompt "import "
python examples/generate.py Qwen/Qwen3-0.6B --chat --prompt "Why is the sky blue?"
"""

import argparse

from te_models import CausalLM
from te_models.checkpoint.pretrained import saved_folder, tokenizer_of
from te_models.data.chat_template import ChatTemplate
from te_models.data.tokenizer import load_tokenizer
from te_models.generation.generate import stream_text
from te_models.interop.hf import local_folder


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", help="a folder, or a name on the Hugging Face hub")
    options.add_argument("--prompt", action="append", help="may be given several times")
    options.add_argument("--recipe", default="bf16", help="bf16, delayed, current, blockwise, mxfp8 or a .toml file")
    options.add_argument("--chat", action="store_true", help="apply the tokenizer's chat template to each prompt")
    options.add_argument("--max-new-tokens", type=int, default=64)
    arguments = options.parse_args()

    folder = saved_folder(local_folder(arguments.model))
    tokenizer = load_tokenizer(tokenizer_of(None, folder))
    model = CausalLM.from_pretrained(folder, recipe=arguments.recipe)
    texts = arguments.prompt or ["The capital of France is", "def fibonacci(n):"]
    prompts = [tokenizer.encode_prompt(text) for text in texts]
    if arguments.chat:
        template = ChatTemplate.of(folder)
        prompts = [tokenizer.encode(template.render([{"role": "user", "content": text}])) for text in texts]

    out = model.generate(prompts, max_new_tokens=arguments.max_new_tokens)
    longest = max(map(len, prompts))
    for text, row in zip(texts, out, strict=True):
        print(f"{text!r} -> {tokenizer.decode(row[longest:].tolist())!r}")

    sampling = dict(do_sample=True, temperature=0.8, top_p=0.95, min_p=0.02, seed=0)
    print(f"\nsampled: {texts[0]}", end="")
    for piece in stream_text(model, tokenizer, prompts[0], arguments.max_new_tokens, **sampling):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
