"""Train on several GPUs, or on CPU cores, with FSDP2: the same program on one process and on many.

python examples/many_gpus.py                                                             # one process
torchrun --standalone --nproc-per-node 2 examples/many_gpus.py --device cpu              # two CPU cores
torchrun --standalone --nproc-per-node 8 examples/many_gpus.py --preset gated-8b --fp8-params --batch-size 64
"""

import argparse
import dataclasses
from pathlib import Path

import torch

from te_models import CausalLM, TrainConfig, Trainer, load_tokenizer, open_data, parallel


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--preset", default="gated-nano")
    options.add_argument(
        "--recipe",
        default="current",
        help="bf16, delayed, current, blockwise, mxfp8, nvfp4, FILE.toml",
    )
    options.add_argument(
        "--fp8-params", action="store_true", help="store weights in FP8 only, and gather FP8"
    )
    options.add_argument("--parallel", default="auto", help="auto, ddp, fsdp, tp or fsdp+tp")
    options.add_argument(
        "--data", help="file, folder, glob, URL or Hub dataset; default: Python's docs"
    )
    options.add_argument("--steps", type=int, default=15)
    options.add_argument(
        "--batch-size", type=int, default=8, help="sequences of all processes together"
    )
    options.add_argument("--seq-len", type=int, default=128)
    options.add_argument("--device", help="cpu trains on CPUs even where there are GPUs")
    options.add_argument("--out", default="runs/many-gpus-example")
    arguments = options.parse_args()

    sizes = dict(steps=arguments.steps, batch_size=arguments.batch_size, seq_len=arguments.seq_len)
    config = TrainConfig(parallel=arguments.parallel, **sizes)
    with parallel(config, arguments.device) as shared:  # joins the processes that torchrun started
        tokenizer = load_tokenizer()
        own = dataclasses.replace(config, batch_size=shared.rows(config.batch_size))
        place = dict(rank=shared.data_rank, world_size=shared.data_world, ranks=shared.ranks)
        dataset, evaluation = open_data(arguments.data, tokenizer, own, **place)
        torch.manual_seed(config.seed)
        model = CausalLM.from_preset(
            arguments.preset,
            build=shared.build,
            recipe=arguments.recipe,
            fp8_params=arguments.fp8_params,
        )
        trainer = Trainer(model, dataset, evaluation, config, Path(arguments.out), parallel=shared)
        if shared.ranks.first:
            print(f"processes: {shared.describe() or 'one'}")
            trainer.on_step = lambda row: print(f"step {row['step']:4d}  loss {row['loss']:.4f}")
        result = trainer.run()
        if shared.ranks.first:
            print(
                f"eval loss {result.first_eval_loss:.4f} -> {result.eval_loss:.4f}; saved in {result.checkpoint}"
            )


if __name__ == "__main__":
    main()
