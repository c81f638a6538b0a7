"""The form of a quantized release's weights in a model: as they are stored, or dequantized."""

STORED = "stored"
DEQUANTIZED = "dequantized"
BASE_WEIGHTS = (STORED, DEQUANTIZED)
# Forms of releases, for the plan of a shape without a folder (te_models.planning.stored_base).
FORM_NAMES = ("mxfp4", "nvfp4", "fp8-block")
