"""The files that a LoRA run writes at its end: its adapters, and on request the model with them in its weights.

An update smaller than half the distance between two BF16 numbers vanishes when the sum is rounded, so a merged model
may have lost part of what the adapters learned. Its loss is measured on the same batches and shown beside theirs.
"""

from dataclasses import replace
from pathlib import Path

from te_models.causal_lm import CausalLM
from te_models.data.tokenizer_base import Tokenizer
from te_models.files.formats import Fields
from te_models.interop.model_card import CARD, adapter_card, user_card
from te_models.interop.origin import DTYPES, TRAINED, as_facts
from te_models.saving.checkpoint_choice import best_checkpoint
from te_models.saving.folder import save_folder
from te_models.saving.pretrained import model_content
from te_models.training.evaluation import Batch, evaluate
from te_models.training.lora_run import Content, LoraRun, load_merged
from te_models.training.result import Result
from te_models.training.resume import run_choices

# Nats per token: losses of one model computed in BF16 and in FP32 may differ by as much.
LEAST_GAIN = 0.01
LEAST_SHARE = 0.05  # of the gain; both losses are shown in any case


def save_adapters(
    adapters: LoraRun,
    content: Content,
    folder: Path,
    tokenizer: Tokenizer,
    batches: list[Batch],
    result: Result,
) -> dict[str, str]:
    """Save the adapters in the folder adapter/ and, with --merge, the model that has them in its weights in merged/.

    `content` is what `adapters.content(live=False)` returned, which several processes may have to call; the run
    evaluates on `batches` of this process. Return the files by what they are, and the merged model's loss.
    """
    model = adapters.model
    lora = adapters.settings
    tensors, documents = content
    documents = {**documents, "run": run_choices(model), **tokenizer.files()}
    facts = as_facts(documents.get(TRAINED), folder / "adapter")
    origin = replace(model.origin, trained=facts)
    card = user_card(folder / "adapter") or adapter_card(model, origin, folder.name)
    if card is not None:
        documents[CARD] = card
    save_folder(folder / "adapter", tensors, documents)
    written = {"adapters": str(folder / "adapter")}
    if not lora.merge:
        return written
    dtype = DTYPES[lora.merge_dtype] if lora.merge_dtype else model.dtype
    # On the emulated engine, into weights that FP8 has not rounded.
    merged = load_merged(
        folder / "adapter",
        base=adapters.base,
        recipe=model.recipe,
        engine="emulated",
        device="cpu",
        dtype=dtype,
    )
    tensors, documents = model_content(merged, merged.origin)
    save_folder(folder / "merged", tensors, {**documents, **tokenizer.files()})
    del merged, tensors  # before it is loaded once more, where the run computes
    place: Fields = {"engine": model.engine, "device": model.device}
    reloaded = CausalLM.from_pretrained(folder / "merged", **place)
    loss = evaluate(reloaded, batches)
    trained = evaluate(model, batches)  # the run's last evaluation may be of several processes
    merged_line = merged_loss(
        loss, trained, result.first_eval_loss, str(dtype).removeprefix("torch.")
    )
    which = f"step {result.step}, the last"
    best = best_checkpoint(folder, result.best_step)
    if best is not None and result.best_eval_loss < result.eval_loss:
        which += (
            f"; step {result.best_step} has a lower eval loss: te-models convert --format te --model {best} "
            f"--out {folder / 'merged-best'}"
        )
    written["merged"] = str(folder / "merged")
    return {**written, "merged from": which, "eval loss merged": merged_line}


def merged_loss(loss: float, trained: float, before: float, dtype: str) -> str:
    """Return a line about the loss of a merged model: beside the loss with adapters, and the share of the gain it lost.

    The gain is `before` - `trained`, the losses of the model without and with adapters.
    """
    line = f"{loss:.4f} in {dtype}, {trained:.4f} with adapters"
    gain = before - trained
    lost = loss - trained
    if not (gain >= LEAST_GAIN and lost >= LEAST_SHARE * gain):
        return line
    line += f": updates vanish in the rounding of the weights, and {100 * lost / gain:.0f} % of the gain with them"
    if dtype == "float32":
        return f"{line}; use the adapters"
    return f"{line}; --merge-dtype float32 keeps more of it"
