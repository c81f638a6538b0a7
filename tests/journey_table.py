"""The table of journeys: what each command line of a user is, and what it must leave.

In commands, `{out}`, `{again}`, `{served}` and `{model}` are folders of the journey's own, `{texts}`, `{chats}` and
`{pairs}` records that tests/journey_data.py writes: texts, conversations, and a CSV of prompts and completions.
"""

import dataclasses
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BASE = (
    "--preset gated-124m --batch-size 8 --seq-len 512 --steps 24 --eval-every 8 --sample-tokens 0"
)
SHIPPED = "--model gated-nano --steps 24 --eval-every 8 --sample-tokens 0"
HYBRID, EXPERTS = "--preset gated-hybrid-nano", "--preset gated-moe-nano"
WIDE = "--preset gated-350m --num-hidden-layers 6"  # head_dim 128
TINY_DENSE = (
    "--preset gated-nano --hidden-size 64 --intermediate-size 96 --head-dim 32 --num-attention-heads 2 "
    "--num-key-value-heads 2"
)
TINY = (
    "--vocab-size 4096 --num-hidden-layers 4 --seq-len 32 --batch-size 4 --device cpu --engine emulated "
    "--learning-rate 0.005 --warmup-steps 2"
)
SMALL_TEXTS = "--data te_models/config"
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2"
TORCHRUN_4 = TORCHRUN.replace("2", "4")
RESTARTING = f"{TORCHRUN} --max-restarts 1"


@dataclasses.dataclass(frozen=True)
class Journey:
    """Commands, each what follows `python`, and what is expected of the last run."""

    commands: tuple[str, ...]
    steps: int = 24  # which the last run's metrics.jsonl must have
    falls: float = 0.5  # nats a token, by which the mean loss of the last three steps is below that of the first three
    graph: bool = True  # whether a GPU captures the step
    gpus: int = 1
    needs: tuple[str, ...] = ()  # packages
    prints: str = ""  # what the output must have in it
    native: bool = False  # whether the emulated engine cannot do it
    early: bool = False  # whether the run must end before its last step
    typed: str = ""  # the standard input of `te-models chat`
    killed: str = ""  # "all" or "one" process, in the first command, once it has saved


def train(flags: str, **fields: Any) -> Journey:
    """A journey of one run of `te-models pretrain`."""
    return Journey((pretrain(flags),), **fields)


def pretrain(flags: str, out: str = "{out}", launch: str = "") -> str:
    """One run's command."""
    return f"{launch} -m te_models pretrain {BASE} {flags} --out {out}".strip()


def tune(flags: str, out: str = "{out}", launch: str = "") -> str:
    """One run's command from the model that ships."""
    return f"{launch} -m te_models finetune {SHIPPED} {flags} --out {out}".strip()


def train_shipped(flags: str) -> Journey:
    """A journey of one run of `te-models finetune`."""
    return Journey((tune(f"--learning-rate 1e-3 {flags}"),), falls=0.2)


def together(flags: str, gpus: int = 2, **fields: Any) -> Journey:
    """One run on two or four GPUs."""
    return Journey(
        (pretrain(flags, launch=TORCHRUN if gpus == 2 else TORCHRUN_4),), gpus=gpus, **fields
    )


ONE_GPU: dict[str, Journey] = {
    # Recipes; those of Blackwell run with plain PyTorch's numbers, slowly.
    "delayed": train("--recipe delayed --sample-tokens 20"),
    "bf16": train("--recipe bf16"),
    "current": train("--recipe current"),
    "blockwise": train("--recipe blockwise"),
    "mxfp8": train("--recipe mxfp8 --engine emulated --steps 8 --warmup-steps 2", steps=8),
    "nvfp4": train("--recipe nvfp4 --engine emulated --steps 8 --warmup-steps 2", steps=8),
    # Saving.
    "save": train("--recipe delayed --save-every 8"),
    "save-eager": train("--recipe current --save-every 8 --no-cuda-graph", graph=False),
    "resume": Journey((pretrain("--recipe delayed --steps 12"), pretrain("--recipe delayed --resume"))),
    "kill": Journey(
        (pretrain("--recipe delayed --steps 60 --save-every 20"), pretrain("--recipe delayed --steps 60 --resume")),
        steps=60, killed="all",
    ),
    "tune-again": Journey(
        (pretrain("--recipe delayed"),
         "-m te_models finetune --model {out} --data python-docs "
         "--recipe current --learning-rate 1e-3 --steps 32 --seq-len 512 "
         "--sample-tokens 0 --out {again}"),
        steps=32, falls=0.05,
    ),
    "generate": Journey(
        (pretrain("--recipe delayed --steps 12"),
        '-m te_models generate --model {out} --prompt "def f(" --max-new-tokens 40'),
        steps=12, prints="def f(",
    ),
    "lora": Journey(
        (pretrain("--recipe delayed --steps 12"),
         "examples/finetune_lora.py --model {out} --recipe delayed --steps 24 --seq-len 512 --batch-size 8 "
         "--out {again}"),
        falls=0.02, needs=("peft",), prints="adapter and merged model in",
    ),
    "lora-flag": Journey(
        (pretrain("--recipe delayed --steps 12"),
         "-m te_models finetune --model {out} --data python-docs "
         "--recipe current --fp8-params --lora 16 --merge --steps 24 --seq-len 512 "
         "--learning-rate 1e-3 --sample-tokens 0 --out {again}"),
        falls=0.02, needs=("peft",), prints="merged",
    ),
    "run-file": Journey(
        (pretrain("--recipe delayed --steps 12"), "-m te_models pretrain {out}/run.toml --steps 24 --out {again}"),
    ),
    "run-file-changed": Journey(
        (tune("--recipe delayed --steps 6 --data {chats}"),
         "-m te_models finetune --steps 24 --recipe current --learning-rate 1e-3 --out {again} {out}/run.toml"),
        falls=0.2,
    ),
    "loggers": train("--recipe current --schedule warmup-stable-decay --log tensorboard", needs=("tensorboard",)),
    # A model's own records, from the shipped model: its default flags, or a rate at which 24 steps show.
    "chat": Journey(
        (tune("--data {chats} --steps 60 --sample-tokens 40"), "-m te_models chat --model {out} --max-new-tokens 20"),
        steps=60, falls=0.03, prints="user: What is a recipe?", typed="What is a recipe?\n/history\n",
    ),
    "prompts": train_shipped("--recipe delayed --data {pairs} --packing documents --seq-len 512"),
    "prompts-alone": train_shipped("--recipe current --data {pairs} --packing none --truncate prompt --seq-len 128"),
    "sources": Journey(
        (tune("--recipe delayed --data {chats}:2 --data {pairs} --eval-data {chats} --epochs 0 --learning-rate 1e-3"),
         "-m te_models generate --model {out}/best --prompt x --max-new-tokens 8"),
        falls=0.2, prints="x",
    ),
    "early-stop": Journey(  # such a rate makes the evaluation worse from the first steps on
        (tune("--recipe delayed --data {chats} --eval-data {texts} --steps 200 --eval-every 4 --patience 2 "
              "--learning-rate 1e-2"),),
        steps=200, early=True, falls=0.05, prints="training made the model worse",
    ),
    "evaluate": Journey(
        (tune("--recipe delayed --data {chats} --learning-rate 1e-3"),
         "-m te_models evaluate --model {out} --recipes bf16,current,delayed --data {pairs} --max-batches 4"),
        falls=0.2, prints="bits per byte",
    ),
    "lora-resume": Journey(
        (tune("--recipe delayed --data {chats} --lora 8 --learning-rate 2e-3 --steps 12 --merge"),
         "-m te_models finetune --resume {out} --steps 24",
         '-m te_models generate --model {out}/adapter --prompt "def f(" --max-new-tokens 8'),
        falls=0.1, needs=("peft",), prints="def f(",
    ),
    # To servers and back.
    **{
        f"export-{format}": Journey(
            (tune("--recipe delayed --data {chats} --learning-rate 1e-3"),
             f"-m te_models export --model {{out}} --format {format} --out {{served}}",
             "-m te_models generate --model {served} --prompt x --max-new-tokens 8"),
            falls=0.2, prints="linears quantized",
        )
        for format in ("fp8-block", "fp8-tensor", "fp8-channel", "mxfp8", "nvfp4", "bf16")
    },
    "parity": Journey(
        (tune("--recipe delayed --data {chats} --learning-rate 1e-3"),
         "-m te_models parity --model {out} --data {texts} --batches 2"),
        falls=0.2, prints="KL (nats",
    ),
    "blocks": Journey(
        (pretrain("--recipe delayed --steps 12 --tokenizer te_models/pretrained/gated-nano/tokenizer.json"),
         "-m te_models export --model {out} --format fp8-block --out {served}",
         "-m te_models finetune --model {served} --data python-docs "
         "--recipe blockwise --fp8-params --learning-rate 1e-3 --steps 24 "
         "--seq-len 512 --sample-tokens 0 --out {again}"),
        falls=0.05,
    ),
    # Random models of other families, as transformers saves them.
    **{
        f"hf-{family}": Journey(
            (f"tests/journey_data.py {family} {{model}}",
             f"-m te_models finetune --model {{model}} --data python-docs "
             f"--recipe {recipe} --learning-rate 1e-3 --steps 24 "
             "--seq-len 512 --sample-tokens 0 --out {out}"),
            needs=("transformers",),
        )
        for family, recipe in (
            ("llama", "delayed"), ("qwen3", "current"), ("gemma2", "delayed"), ("phi3", "blockwise"),
            ("olmo2", "delayed"),
        )
    },
    # Micro-batches and memory.
    "accumulate": train("--recipe delayed --gradient-accumulation 4"),
    "accumulate-save": train("--recipe current --gradient-accumulation 4 --save-every 8"),
    "selective": train("--recipe delayed --activation-checkpointing selective"),
    "selective-bf16": train("--recipe bf16 --activation-checkpointing selective"),
    "full": train("--recipe current --activation-checkpointing full"),
    "full-save": train("--recipe delayed --activation-checkpointing full --save-every 8"),
    "offload": train("--recipe delayed --activation-offload", graph=False),
    "offload-full": train("--recipe delayed --activation-checkpointing full --activation-offload", graph=False),
    "fp8-params": train("--recipe delayed --fp8-params"),
    "fp8-params-current": train("--recipe current --fp8-params"),
    "fp8-params-accumulate": train("--recipe current --fp8-params --gradient-accumulation 2"),
    "fp8-params-save": train("--recipe delayed --fp8-params --save-every 8"),
    # Data.
    "documents": train("--recipe delayed --packing documents"),
    "streaming": train("--recipe delayed --streaming --data {texts}"),
    "streaming-documents": train("--recipe bf16 --streaming --packing documents --data {texts}"),
    # Optimizers.
    "adamw8bit": train("--recipe delayed --optimizer adamw8bit", needs=("torchao",)),
    "adamwfp8": train("--recipe delayed --optimizer adamwfp8", needs=("torchao",)),
    "muon": train("--recipe delayed --optimizer muon"),
    "muon8bit": train("--recipe delayed --optimizer muon8bit"),
    "galore": train("--recipe delayed --optimizer galore"),
    "optimizer-offload": train("--recipe delayed --optimizer-offload"),
    # Lengths, shapes, and other ways through the model.
    "length-333": train("--recipe delayed --seq-len 333 --batch-size 3"),
    "length-1000": train("--recipe bf16 --seq-len 1000 --batch-size 4"),
    "length-48": train("--recipe delayed --seq-len 48 --batch-size 5"),
    "window": train("--recipe delayed --sliding-window 128"),
    "headwise": train("--recipe delayed --attention-gate headwise"),
    "ungated": train("--recipe delayed --attention-gate none"),
    "fp8-head": train("--recipe delayed --lm-head fp8 --num-layers-at-end-in-bf16 0"),
    "deterministic": train("--recipe delayed --deterministic"),
    "wide": train(f"{WIDE} --recipe delayed"),
    "wide-bf16": train(f"{WIDE} --recipe bf16 --seq-len 333 --batch-size 3"),
    "wide-grouped": train(f"{WIDE} --recipe current --num-key-value-heads 2 --activation-checkpointing selective"),
    "wide-blockwise": train(f"{WIDE} --recipe blockwise --seq-len 1000 --batch-size 4"),
    "wide-1b": train("--preset gated-1b --num-hidden-layers 4 --recipe delayed --fp8-params --seq-len 2048"),
    # Hybrids and experts.
    "hybrid": train(f"{HYBRID} --recipe delayed --save-every 8"),
    "hybrid-packed": train(f"{HYBRID} --recipe current --packing documents --data {{texts}} --seq-len 333"),
    "hybrid-resume": Journey(
        (pretrain(f"{HYBRID} --recipe delayed --steps 12"), pretrain(f"{HYBRID} --recipe delayed --resume"))
    ),
    "hybrid-lora": Journey(
        (pretrain(f"{HYBRID} --recipe current --steps 12"),
         "-m te_models finetune --model {out} --data {chats} --lora 8 --learning-rate 2e-3 --steps 24 "
         "--sample-tokens 0 --out {again}"),
        falls=0.1, needs=("peft",),
    ),
    "hybrid-generate": Journey(
        (pretrain(f"{HYBRID} --recipe delayed --steps 12"),
         '-m te_models generate --model {out} --prompt "def f(" --max-new-tokens 40'),
        steps=12, prints="def f(",
    ),
    "experts": train(f"{EXPERTS} --recipe delayed --save-every 8"),
    "experts-current": train(f"{EXPERTS} --recipe current --activation-checkpointing full"),
    "experts-resume": Journey(
        (pretrain(f"{EXPERTS} --recipe delayed --steps 12"), pretrain(f"{EXPERTS} --recipe delayed --resume"))
    ),
    "experts-export": Journey(
        (pretrain(f"{EXPERTS} --recipe current --steps 12"),
         "-m te_models export --model {out} --format fp8-block --out {served}",
         "-m te_models generate --model {served} --prompt x --max-new-tokens 8"),
        steps=12, prints="linears quantized",
    ),
    "heads-of-96": train("--num-attention-heads 8 --recipe delayed"),
    "heads-of-256": train("--num-attention-heads 3 --recipe delayed"),
}  # fmt: skip

SHARED = "--recipe delayed --parallel"
TWO_GPUS: dict[str, Journey] = {
    "two-ddp": together(f"{SHARED} ddp"),
    "two-fsdp": together(f"{SHARED} fsdp"),
    "two-fsdp-bf16": together("--recipe bf16 --parallel fsdp"),
    "two-fsdp-current": together("--recipe current --parallel fsdp --no-reshard-after-forward"),
    "two-fsdp-fp8-params": together(f"{SHARED} fsdp --fp8-params", graph=False),
    "two-fsdp-full": together(f"{SHARED} fsdp --activation-checkpointing full"),
    "two-fsdp-selective": together(f"{SHARED} fsdp --activation-checkpointing selective"),
    "two-fsdp-accumulate": together(f"{SHARED} fsdp --gradient-accumulation 2"),
    "two-fsdp-kept-accumulate": together(
        "--recipe current --parallel fsdp --no-reshard-after-forward --gradient-accumulation 3"
    ),
    "two-ddp-accumulate": together(f"{SHARED} ddp --gradient-accumulation 3"),
    "two-fsdp-save": together(f"{SHARED} fsdp --save-every 8"),
    "two-fsdp-length-333": together(f"{SHARED} fsdp --seq-len 333 --batch-size 6"),
    "two-ddp-save": together("--recipe current --parallel ddp --save-every 8"),
    "two-ddp-streaming": together(f"{SHARED} ddp --streaming --data {{texts}}"),
    "two-fsdp-muon": together(f"{SHARED} fsdp --optimizer muon"),
    "two-tp": together(f"{SHARED} tp", graph=False),
    "two-tp-save": together("--recipe current --parallel tp --save-every 8", graph=False),
    "two-tp-sequence": together(f"{SHARED} tp --sequence-parallel", graph=False),
    "two-hybrid": together(f"{HYBRID} {SHARED} fsdp"),
    "two-experts-fsdp": together(f"{EXPERTS} --recipe bf16 --parallel fsdp"),
    "two-experts": together(f"{EXPERTS} --recipe current --parallel fsdp+ep --save-every 8"),
    "two-experts-delayed": together(f"{EXPERTS} {SHARED} fsdp+ep --fp8-dispatch"),
    "two-experts-then-one": Journey(
        (pretrain(f"{EXPERTS} {SHARED} fsdp+ep --steps 12", launch=TORCHRUN),
         pretrain(f"{EXPERTS} --recipe delayed --resume")), gpus=2,
    ),
    "two-then-one": Journey(
        (pretrain(f"{SHARED} fsdp --steps 12", launch=TORCHRUN), pretrain("--recipe delayed --resume")), gpus=2
    ),
    "one-then-two": Journey(
        (pretrain("--recipe delayed --steps 12"), pretrain(f"{SHARED} fsdp --resume", launch=TORCHRUN)), gpus=2
    ),
    "two-run-file": Journey(
        (pretrain("--recipe delayed --steps 12"),
         f"{TORCHRUN} -m te_models pretrain --parallel fsdp --steps 24 --out {{again}} {{out}}/run.toml"), gpus=2
    ),
    "two-lora": Journey(
        (tune("--recipe delayed --data {chats} --lora 8 --learning-rate 2e-3 --merge", launch=TORCHRUN),),
        gpus=2, falls=0.1, needs=("peft",), prints="merged",
    ),
    "two-chat-fsdp": Journey(
        (tune("--recipe delayed --data {chats} --learning-rate 1e-3 --parallel fsdp", launch=TORCHRUN),),
        gpus=2, falls=0.2,
    ),
    "two-export": Journey(
        (pretrain(f"{SHARED} fsdp", launch=TORCHRUN),
         "-m te_models export --model {out} --format fp8-tensor --out {served}",
         "-m te_models generate --model {served} --prompt x --max-new-tokens 8"),
        gpus=2, prints="linears quantized",
    ),
    "two-kill-one": Journey(
        (pretrain(f"{SHARED} fsdp --steps 60 --save-every 20", launch=RESTARTING),), steps=60, gpus=2, killed="one"
    ),
    "two-kill-all": Journey(
        (pretrain(f"{SHARED} fsdp --steps 60 --save-every 20", launch=TORCHRUN),
         pretrain(f"{SHARED} fsdp --steps 60 --resume", launch=TORCHRUN)),
        steps=60, gpus=2, killed="all",
    ),
}  # fmt: skip
FOUR_GPUS: dict[str, Journey] = {
    "four-ddp": together("--recipe current --parallel ddp", gpus=4),
    "four-fsdp": together(f"{SHARED} fsdp --save-every 8", gpus=4),
    "four-fsdp-tp": together(f"{SHARED} fsdp+tp --tensor-parallel-size 2 --save-every 8", gpus=4, graph=False),
    "four-fsdp-tp-sequence": together(
        "--recipe current --parallel fsdp+tp --tensor-parallel-size 2 --sequence-parallel", gpus=4, graph=False
    ),
    "four-hybrid": together(f"{HYBRID} {SHARED} fsdp", gpus=4),
    "four-experts": together(f"{EXPERTS} {SHARED} fsdp+ep", gpus=4),
    "four-experts-in-pairs": together(
        f"{EXPERTS} {SHARED} fsdp+ep --expert-parallel-size 2 --fp8-dispatch --save-every 8", gpus=4
    ),
    "four-then-two-then-one": Journey(
        (pretrain(f"{SHARED} fsdp+tp --tensor-parallel-size 2 --steps 8", launch=TORCHRUN_4),
         pretrain(f"{SHARED} fsdp --steps 16 --resume", launch=TORCHRUN), pretrain("--recipe delayed --resume")),
        gpus=4,
    ),
}  # fmt: skip
JOURNEYS = ONE_GPU | TWO_GPUS | FOUR_GPUS
