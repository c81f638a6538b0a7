"""Where the time of a step with experts goes, by kinds of kernels, and what memory alone would take."""

from __future__ import annotations

from benchmarks.expert_profile import SHAPES
from benchmarks.tables.text import load, markdown, measured_on, prose, table

RECIPES = ("bf16", "delayed", "current", "blockwise")
NAMES = {"olmoe": "OLMoE's width", "a3b": "Qwen3-30B-A3B's width"}
# Kinds of benchmarks/expert_profile.py, by the line of the table.
LINES: dict[str, tuple[str, ...]] = {
    "products of experts": ("products of experts",),
    "casts of experts, activation between the projections": ("casts of experts", "SwiGLU"),
    "rows to experts and back, gradients of gates": ("rows to experts and back",),
    "other products, head included": ("other products",),
    "attention": ("attention",),
    "other casts": ("casts",),
    "norms, RoPE, router, loss, copies": (
        "norms",
        "RoPE and gate",
        "router",
        "head and loss",
        "copies",
        "fills",
        "elementwise",
        "compiled",
        "other",
    ),
}
BANDWIDTH = 4.2e12  # bytes per second that an H200 copies


def least_cast_ms(shape: str) -> float:
    """Return the milliseconds in which the bytes of the experts' casts of a step pass through memory, `delayed`."""
    fields, batch, seq = SHAPES[shape]
    moe = fields["moe"]
    width = moe["moe_intermediate_size"]
    hidden = fields["hidden_size"]
    rows = batch * seq * moe["num_experts_per_tok"]
    weights = 3 * moe["num_experts"] * width * hidden
    tokens = batch * seq * hidden
    # BF16 is read and FP8 written, of weights in forward and in backward.
    moved = 2 * 3 * weights
    # Rows of x in forward and, transposed, in backward; of the gradient in both copies; the tokens are read for each.
    moved += 4 * rows * hidden + 3 * 2 * tokens
    # gate and up are read and the activation written; backward reads three and writes two gradients twice and it once.
    moved += (4 + 1) * rows * width + (2 + 4 + 2 * 2 + 1) * rows * width
    return 1e3 * fields["num_hidden_layers"] * moved / BANDWIDTH


@table
def expert_account() -> str:
    """Kernels of a step by kind, under each recipe."""
    result = load("expert_profile_h200")
    tables = []
    for shape, name in NAMES.items():
        found = {row["recipe"]: row for row in result["rows"] if row["shape"] == shape}
        recipes = [recipe for recipe in RECIPES if recipe in found]
        rows = []
        for line, kinds in LINES.items():
            cells = [line]
            for recipe in recipes:
                by_kind = found[recipe]["ms_by_kind"]
                cells.append(f"{sum(by_kind.get(kind, 0.0) for kind in kinds):.1f}")
            rows.append(cells)
        rows.append(["**step**", *(f"**{found[recipe]['ms']:.1f}**" for recipe in recipes)])
        header = " | ".join(f"`{recipe}`" for recipe in recipes)
        tables.append(markdown(f"{name}, ms | {header}", rows))
    olmoe, a3b = (f"{least_cast_ms(shape):.1f}" for shape in NAMES)
    idle = max(load("expert_account_h200")["idle_ms"].values())
    about = (
        "Kernels are from a profile, in which the card's clocks are a little higher than in the timed steps; between "
        f"them a step is idle for {idle:.1f} ms at most. At {BANDWIDTH / 1e12:.1f} TB/s the bytes of the second line "
        f"would take {olmoe} and {a3b} ms under `delayed`: 3.5 of them for weights, which are read in BF16 and written "
        "in FP8 in forward and again in backward."
    )
    return "\n\n".join([*tables, f"{prose(about)} {measured_on(result)}"])
