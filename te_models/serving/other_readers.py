"""Notes on exports that other programs do not read, or read wrongly."""

from collections.abc import Mapping

from te_models.files.formats import list_some


def not_read(format: str, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return notes on quantized weights, of these shapes by name, that other programs do not read."""
    wrong = "transformers 5.24 reads wrong values, without an error,"
    elsewhere = "use a server, or te_models"
    if format == "fp8-tensor":
        return [f"{wrong} from {format}, whose scales it does not look for: {elsewhere}"]
    if format in ("mxfp8", "nvfp4") and any(".experts." in name for name in shapes):
        unless = ""
        if format == "nvfp4":
            unless = ", and if no layer's are in BF16 reads wrong values without an error"
        return [f"transformers 5.24 fails on experts in {format}{unless}: {elsewhere}"]
    if format != "fp8-block":
        return []
    notes = []
    # It divides the weight into q, k and v, and not the scales.
    if any(name.endswith(".query_key_value") for name in shapes):
        notes.append(f"{wrong} for query_key_value in {format}: {elsewhere}, or take fp8-channel")
    odd = []
    for name, shape in shapes.items():
        if any(size % 128 for size in shape):
            odd.append(f"{name} {list(shape)}")
    if odd:
        notes.append(
            f"{len(odd)} weights have sizes that are no multiples of 128 ({list_some(odd, limit=2)}): vLLM and SGLang "
            "refuse such rows in q, k, v, gate and up, and transformers some of them; fp8-channel has no such limit"
        )
    return notes
