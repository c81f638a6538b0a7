"""Table of the buffers that FSDP2 leaves to share between gathered weights and gradients."""

from __future__ import annotations

from benchmarks.tables.text import GIB, markdown, prose, table
from te_models.config.presets import get_preset
from te_models.config.recipe import get_recipe
from te_models.planning.memory_plan import plan_memory

BF16_BYTES = 2
SHARED = (("llama-3.1-8b", 2), ("llama-3.1-8b", 8), ("olmo2-32b", 8))


@table
def mxfp8_buffers() -> str:
    """Bytes that one buffer for gathered weights and gradients would save, per GPU."""
    lines = []
    for preset, gpus in SHARED:
        config = get_preset(preset, max_position_embeddings=8192)
        plan = plan_memory(
            config,
            get_recipe("mxfp8"),
            batch_size=gpus,
            seq_len=8192,
            activation_checkpointing="full",
            gpus=gpus,
        )
        elements = sum(linear.inputs * linear.outputs for linear in config.linears.values())
        block = BF16_BYTES * elements // config.num_hidden_layers
        lines.append(
            [
                f"`{preset}`",
                str(gpus),
                f"{BF16_BYTES * config.num_parameters / GIB:.1f} GiB",
                f"{2 * block / GIB:.2f} GiB",
                f"{block / GIB:.2f} GiB",
                f"{plan.peak.total / GIB:.1f} GiB",
                f"{block / plan.peak.total:.1%}",
            ]
        )
    header = (
        "model | GPUs | whole weights in BF16 | FSDP2: gathered blocks | gradient of a block | planned peak per GPU | "
        "most that sharing saves"
    )
    about = prose(
        "`mxfp8`, one sequence of 8,192 tokens per GPU, `adamw`, full recomputation, resharding after forward; "
        "planned, not measured."
    )
    return f"{about}\n\n{markdown(header, lines)}"
