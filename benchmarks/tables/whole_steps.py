"""Tables of whole training steps: their kernels, accumulated micro-batches, and the first steps of a process."""

from __future__ import annotations

from statistics import fmean

from benchmarks.tables.text import load, markdown, measured_on, prose, table

WAYS = {"fsdp": "FSDP2", "ddp": "DDP"}  # of several GPUs
# Lines of benchmarks/whole_step.py first -> what has been done by then.
MOMENTS = {
    "imported": "imports",
    "built": "Transformer Engine and the model",
    "calibrated": "first scales of `delayed`",
    "step 1": "first step",
    "step 6": "sixth step, as a CUDA graph",
}


@table
def whole_step() -> str:
    """A step of gated-1b with gradient norm and AdamW, and its kernels."""
    result = load("whole_step_1b_h200")
    settings = result["settings"]
    row = result["rows"][0]
    found = result["profile"]
    outside = {kernel["name"]: kernel["ms"] for kernel in found["outside"]}
    norm = outside["_squares_kernel"] + outside["_norm_kernel"]
    kernels = found["inside_graphs_ms"] + found["outside_ms"]
    others = ", ".join(f"{other['ms']:.1f}" for other in result["other_processes"])
    return prose(
        f"A whole step of `{settings['preset']}` under `{settings['recipe']}`, {settings['batch_size']} x "
        f"{settings['seq_len']:,} tokens, with gradient norm and AdamW, took {row['ms']:.1f} ms "
        f"({row['tokens_per_second']:,.0f} tokens/s, {row['peak_gib']:.1f} GiB), and {others} ms in another process of "
        f"the same hour. Its kernels take {kernels:.1f} ms in a profile: {found['inside_graphs_ms']:.1f} forward and "
        f"backward, {outside['_adamw_kernel']:.1f} AdamW, {norm:.2f} the norm of gradients; the device is idle for "
        f"{found['idle_ms']:.1f}. {measured_on(result)}"
    )


@table
def first_steps() -> str:
    """Seconds from the start of a process to its first steps."""
    result = load("first_steps_1b_h200")
    runs = result["runs"]
    rows = []
    for name, said in MOMENTS.items():
        rows.append([said, *(f"{run[name]:.1f}" for run in runs.values())])
    header = "seconds from the start of the process to | " + " | ".join(
        f"{name} caches" for name in runs
    )
    settings = result["settings"]
    about = prose(
        f"`{settings['preset']}` under `{settings['recipe']}`, {settings['batch_size']} x {settings['seq_len']:,} "
        f"tokens. {measured_on(result)}"
    )
    return f"{about}\n\n{markdown(header, rows)}"


@table
def flash_attention_4_steps() -> str:
    """Steps of gated-1b with FlashAttention-4 and with cuDNN's attention."""
    ours, usual = load("step_1b_flash_4_h200"), load("step_1b_cudnn_h200")
    lines = []
    for row, other in zip(ours["rows"], usual["rows"], strict=True):
        recipe = row["name"].removeprefix("te-models ").removesuffix("+graph")
        lines.append(_compared(f"forward and backward, `{recipe}`", other["ms"], row["ms"]))
    whole = load("whole_step_1b_flash_4_h200")
    times: dict[str, list[float]] = {}
    for run in whole["runs"]:
        times.setdefault(run["attention"], []).append(run["ms"])
    cudnn, flash = fmean(times["cuDNN"]), fmean(times["FlashAttention-4"])
    lines.append(_compared(f"whole step, `{whole['settings']['recipe']}`", cudnn, flash))
    for file in ("long_bench_bf16", "long_bench_delayed"):
        row, other = (load(name)["rows"][-1] for name in (f"{file}_flash_4_h200", f"{file}_h200"))
        recipe = row["name"].removeprefix("te-models ").split("+")[0]
        lines.append(_compared(f"1 x 32,768 tokens, no gates, `{recipe}`*", other["ms"], row["ms"]))
    first = whole["first_steps"]
    found = whole["profile"]
    kernels = found["inside_graphs_ms"] + found["outside_ms"]
    about = prose(
        f"`{whole['settings']['preset']}`, first and last layer in BF16 but for long rows; each variant is one "
        f"process, a whole step is the mean of two. * cuDNN's figure is of another day. Kernels of the whole step with "
        f"FlashAttention-4 take {kernels:.1f} ms in a profile of three steps. Its "
        f"first step is done {first['cold']['step 1']:.1f} s after the start of a process with empty caches, and after "
        f"{first['warm']['step 1']:.1f} with full ones. {measured_on(whole)}"
    )
    header = "step | cuDNN, ms | FlashAttention-4, ms | speed"
    return f"{markdown(header, lines)}\n\n{about}"


def _compared(name: str, cudnn: float, flash: float) -> list[str]:
    """Return a row: milliseconds with both kernels, and their ratio."""
    return [name, f"{cudnn:.1f}", f"{flash:.1f}", f"{cudnn / flash:.2f}x"]


@table
def accumulation_two_gpus() -> str:
    """Steps of one and of eight micro-batches on two GPUs."""
    lines = []
    results = {way: load(f"accumulation_896_{way}_h200_x2") for way in WAYS}
    for way, result in results.items():
        for row in result["rows"]:
            lines.append(
                [
                    WAYS[way],
                    str(row["accumulation"]),
                    f"{row['ms']:.1f}",
                    f"{row['tokens_per_second']:,.0f}",
                    f"{row['per_token']:.3f}",
                    f"{row['peak_gib']:.1f} GiB",
                ]
            )
    first = results["fsdp"]
    settings = first["settings"]
    about = prose(
        f"`{settings['preset']}` under `{settings['recipe']}`, {settings['batch_size']} x {settings['seq_len']:,} "
        f"tokens per micro-batch on each GPU, gradient norm and AdamW included, CUDA graphs. "
        f"{measured_on({**first, 'gpus': 2})}"
    )
    header = "way | micro-batches per step | ms per step | tokens/s of both | time per token | peak per GPU"
    return f"{about}\n\n{markdown(header, lines)}"
