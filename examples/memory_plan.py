"""Which batch fits a GPU, and what takes the memory? Nothing is built, and no GPU is needed.

python examples/memory_plan.py --preset gated-1b --recipe current --gigabytes 80
"""

import argparse

from te_models import CausalLM


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--preset", default="gated-1b")
    options.add_argument("--recipe", default="current")
    options.add_argument("--gigabytes", type=float, default=80, help="memory of the GPU")
    options.add_argument("--seq-len", type=int, default=2048)
    arguments = options.parse_args()

    for mode in ("none", "selective", "full"):
        keywords = dict(recipe=arguments.recipe, activation_checkpointing=mode, device="meta")
        model = CausalLM.from_preset(arguments.preset, **keywords)
        plan = model.plan_memory(batch_size=1, seq_len=arguments.seq_len, optimizer="adamw")
        largest = plan.largest_batch(arguments.gigabytes)
        print(f"activation_checkpointing={mode}: {largest} x {arguments.seq_len} tokens")
    plan = model.plan_memory(
        batch_size=max(1, largest), seq_len=arguments.seq_len, optimizer="adamw"
    )
    print(f"the peak is in {plan.peak.moment}")
    print(plan)


if __name__ == "__main__":
    main()
