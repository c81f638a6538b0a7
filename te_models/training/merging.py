"""The files that a LoRA run writes at its end: its adapters, and on request the model with them in its weights.

An update smaller than half the distance between two BF16 numbers vanishes when the sum is rounded, so a merged model
may have lost part of what the adapters learned. Its loss is measured on the same batches and shown beside theirs.
"""

import shlex
from dataclasses import replace
from pathlib import Path

from te_models.causal_lm import CausalLM
from te_models.data.tokenizer_base import Tokenizer
from te_models.files.formats import Fields
from te_models.interop.model_card import CARD, adapter_card, user_card
from te_models.interop.origin import TRAINED, as_facts
from te_models.model.dtypes import DTYPES
from te_models.saving.checkpoint_choice import ADAPTER_FOLDER, best_checkpoint
from te_models.saving.folder import save_folder
from te_models.saving.pretrained import model_content
from te_models.training.evaluation import Batch, evaluate
from te_models.training.lora_run import Content, LoraRun, load_merged
from te_models.training.result import Result
from te_models.training.resume import run_choices

# In nats per token. A smaller gain of the adapters says nothing: losses of a model in BF16 and FP32 differ by as much.
LEAST_GAIN = 0.01
LEAST_SHARE = 0.05  # of the gain: a smaller loss by merging is not remarked upon


def save_adapters(
    adapters: LoraRun,
    content: Content,
    folder: Path,
    tokenizer: Tokenizer,
    batches: list[Batch],
    result: Result,
) -> dict[str, str]:
    """Save the adapters in the folder adapter/ and, with --merge, the model that has them in its weights in merged/.

    Args:
        adapters: of the run.
        content: of the adapters' files, from `adapters.content(resumable=False)`, which processes call together.
        folder: of the run.
        tokenizer: of the run, whose files are saved with both.
        batches: the batches of this process on which the merged model's loss is measured.
        result: of the run.

    Returns:
        "adapters" and "merged", the folders that were written; "merged from" and "eval loss merged", lines for the
        summary.
    """
    model = adapters.model
    tensors, documents = content
    documents = {**documents, "run": run_choices(model), **tokenizer.files()}
    facts = as_facts(documents.get(TRAINED), folder / ADAPTER_FOLDER)
    origin = replace(model.origin, trained=facts)
    card = user_card(folder / ADAPTER_FOLDER) or adapter_card(model, origin, folder.name)
    if card is not None:
        documents[CARD] = card
    save_folder(folder / ADAPTER_FOLDER, tensors, documents)
    written = {"adapters": str(folder / ADAPTER_FOLDER)}
    if adapters.settings.merge:
        written |= _save_merged(adapters, folder, tokenizer, batches, result)
    return written


def _save_merged(
    adapters: LoraRun,
    folder: Path,
    tokenizer: Tokenizer,
    batches: list[Batch],
    result: Result,
) -> dict[str, str]:
    """Save the merged model in merged/; return its folder, its step and its loss, as `save_adapters` does."""
    model = adapters.model
    settings = adapters.settings
    dtype = DTYPES[settings.merge_dtype] if settings.merge_dtype else model.dtype
    # From the base's own values, on the CPU: the weights of the run may be rounded to FP8, and its GPU may be full.
    merged = load_merged(
        folder / ADAPTER_FOLDER,
        base=adapters.base,
        recipe=model.recipe,
        engine="emulated",
        device="cpu",
        dtype=dtype,
    )
    tensors, documents = model_content(merged, merged.origin)
    save_folder(folder / "merged", tensors, {**documents, **tokenizer.files()})
    # The memory is needed for the next line, which loads what a user would load, where the run computes.
    del merged, tensors
    place: Fields = {"engine": model.engine, "device": model.device}
    reloaded = CausalLM.from_pretrained(folder / "merged", **place)
    loss = evaluate(reloaded, batches)
    # Not the run's last evaluation: that was over the batches of all processes.
    trained = evaluate(model, batches)
    dtype_name = str(dtype).removeprefix("torch.")
    return {
        "merged": str(folder / "merged"),
        "merged from": _merged_step(folder, result),
        "eval loss merged": merged_loss(loss, trained, result.first_eval_loss, dtype_name),
    }


def _merged_step(folder: Path, result: Result) -> str:
    """Return a line about the step whose adapters were merged, with the command for a better one if there is one."""
    line = f"step {result.step}, the last"
    best = best_checkpoint(folder, result.best_step)
    if best is None or not result.best_eval_loss < result.eval_loss:
        return line
    command = ["te-models", "convert", "--format", "te", "--model", str(best)]
    command += ["--out", str(folder / "merged-best")]
    return f"{line}; step {result.best_step} has a lower eval loss: {shlex.join(command)}"


def merged_loss(loss: float, trained: float, before: float, dtype: str) -> str:
    """Return a line about the loss of a merged model, with advice if merging lost much of the gain.

    Args:
        loss: of the merged model, in nats per token.
        trained: of the model with adapters beside its weights.
        before: of the model without adapters; `before` - `trained` is the gain.
        dtype: of the merged weights, such as "bfloat16".
    """
    line = f"{loss:.4f} in {dtype}, {trained:.4f} with adapters"
    gain = before - trained
    lost = loss - trained
    # Written so that a NaN among the losses ends here too.
    remarkable = gain >= LEAST_GAIN and lost >= LEAST_SHARE * gain
    if not remarkable:
        return line
    line += f": updates vanish in the rounding of the weights, and {100 * lost / gain:.0f} % of the gain with them"
    if dtype == "float32":
        return f"{line}; use the adapters"
    return f"{line}; --merge-dtype float32 keeps more of it"
