"""Table of hybrids and of long rows, as `te-models bench` measured them."""

from __future__ import annotations

from benchmarks.tables.speed import VARIANTS
from benchmarks.tables.text import GIB, load, markdown, measured_on, prose, table

# Results of `te-models bench` -> the model.
BENCHES = {
    "hybrid_bench_h200": "Qwen3.5-4B's width, 8 layers",
    "hybrid_bench_flash_qla_h200": "the same, by FlashQLA",
    "hybrid_bench_65536_h200": "the same, full recomputation",
    "hybrid_bench_65536_flash_qla_h200": "the same, full recomputation, by FlashQLA",
    "long_bench_bf16_h200": "`gated-1b` without gates",
    "long_bench_delayed_h200": "`gated-1b` without gates",
    "long_bench_bf16_flash_4_h200": "the same, by FlashAttention-4",
    "long_bench_delayed_flash_4_h200": "the same, by FlashAttention-4",
}


def variant(name: str) -> str:
    """Return a variant of `te-models bench` as a table says it."""
    if name in VARIANTS:
        return VARIANTS[name].replace("*", "")
    recipe, *options = name.removeprefix("te-models ").split("+")
    quantized = recipe != "bf16" and "no_edges" not in options
    return f"te-models `{recipe}`" + (", first and last layer in BF16" if quantized else "")


@table
def hybrids_and_long_rows() -> str:
    """Forward and backward of a hybrid, and of long rows."""
    lines = []
    limits = []
    for file, model in BENCHES.items():
        result = load(file)
        settings = result["settings"]
        tokens = f"{settings['batch_size']} x {settings['seq_len']:,}"
        rows = result["rows"]
        for row in rows:
            cells = [model, tokens, variant(row["name"]), f"{row['ms']:.1f}"]
            cells += [f"{row['tokens_per_second']:,.0f}", f"{row['speed']:.2f}x"]
            cells.append(f"{row['of_roofline']:.2f}" if "of_roofline" in row else "")
            lines.append([*cells, f"{row['peak_gib']:.1f} GiB"])
        # The roofline counts no recomputation, and that of the runs with FlashAttention-4 has cuDNN's attention.
        counts_all = not rows[0]["name"].endswith("+full") and "flash_4" not in file
        if result["roofline"] is not None and counts_all:
            most = rows[0]["ms"] / result["roofline"]["total"]
            by = " by FlashQLA" if "flash_qla" in file else ""
            limits.append(f"{most:.2f} times {variant(rows[0]['name'])}{by} at {tokens} tokens")
    header = (
        "model | tokens per step | variant | ms | tokens/s | speed | of the roofline | peak memory"
    )
    about = prose(
        f"{measured_on(load('hybrid_bench_h200'))} The roofline is at {', '.join(limits)}."
    )
    return f"{markdown(header, lines)}\n\n{about}"


@table
def delta_rule_kernels() -> str:
    """Forward and backward of the gated delta rule by each package, as CUDA graphs."""
    result = load("delta_rule_kernels_h200")
    rows = [row for row in result["rows"] if not row["packed"]]
    measured = {(row["batch"], row["seq"], row["package"]): row for row in rows}
    lines = []
    for batch, seq in sorted({(row["batch"], row["seq"]) for row in rows}):
        usual = measured[batch, seq, "flash-linear-attention"]
        fused = measured[batch, seq, "FlashQLA"]
        cells = [f"{batch} x {seq:,}"]
        for field in ("forward_ms", "forward_backward_ms"):
            faster = usual[field] / fused[field]
            cells += [f"{usual[field]:.2f}", f"{fused[field]:.2f}", f"{faster:.2f}x"]
        cells += [f"{row['peak_bytes'] / GIB:.2f} GiB" for row in (usual, fused)]
        lines.append(cells)
    header = (
        "tokens | fla, forward, ms | FlashQLA | faster | fla, with backward, ms | FlashQLA | faster | "
        "fla, peak | FlashQLA"
    )
    return f"{measured_on(result)}\n\n{markdown(header, lines)}"
