"""The model card (README.md) of a folder for transformers, in the form of the Hugging Face hub."""

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from te_models.files.atomic import reraising
from te_models.files.formats import Document, Fields, read_json
from te_models.interop.origin import TRAINED, Origin
from te_models.model.decoder import Decoder

CARD = "README.md"
MARK = "<!-- Written by te-models, which replaces this file on the next save unless you delete this line. -->"
# The losses in the facts of a run, with their names in the card.
LOSSES = {
    "first_eval_loss": "eval loss before training",
    "eval_loss": "eval loss after",
    "loss": "last training loss",
    "best_eval_loss": "lowest eval loss",
}
DAMAGE = (AttributeError, LookupError, TypeError, ValueError)  # of facts that are none
_HUB_CACHE = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/[^/]+/?$")

_BODY = """{mark}

# {title}

{intro}

| | |
| --- | --- |
{rows}

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{name}"{options})
```

```python
from te_models import CausalLM

model = CausalLM.from_pretrained("{name}", recipe="{recipe}")
```
"""


_ADAPTER_BODY = """{mark}

# {title}

LoRA adapters for {base}, trained with te-models {under} on the engine `{engine}`.

| | |
| --- | --- |
{rows}

`peft.PeftModel.from_pretrained(model, folder)` reads them for the same model in transformers, and
`te_models.CausalLM.from_pretrained(folder)` with their model.
"""


def user_card(folder: Path) -> bytes | None:
    """Return the card in a folder if te-models did not write it, or if its user has claimed it since."""
    path = folder / CARD
    # A missing card counts as one of ours, which may be written.
    content = path.read_bytes() if path.is_file() else MARK.encode()
    return None if MARK.encode() in content else content


def model_card(
    model: Decoder, origin: Origin, config: Document, name: str, code: bool
) -> bytes | None:
    """Return the card of a model that came from `origin`; None without the package huggingface_hub.

    `config` is the config.json that is written with it, `name` the name of the folder or repository, and `code` whether
    the folder holds code that transformers needs.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    facts = _facts(model, origin)
    # The facts come from a file that anybody may have edited.
    with reraising(f"{origin.adapters or origin.folder}/{TRAINED}.json", *DAMAGE):
        body = _BODY.format(
            mark=MARK,
            title=name.rpartition("/")[2],
            intro=_intro(model, facts),
            recipe=model.recipe.name,
            rows=_table({**_rows(model, config), **_run_rows(facts)}),
            name=name,
            options=", trust_remote_code=True" if code else "",
        )
        return _card(
            body,
            model,
            origin=origin,
            facts=facts,
            library="transformers",
            tags=["custom_code"] if code else [],
        )


def adapter_card(model: Decoder, origin: Origin, name: str) -> bytes | None:
    """Return the card of the adapters that a run has trained on a model; None without the package huggingface_hub."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    facts = _facts(model, origin)
    body = _ADAPTER_BODY.format(
        mark=MARK,
        title=name,
        base=facts.get("base_model") or facts.get("base") or "a model",
        under=_under(facts["recipes"]),
        engine=facts.get("engine", model.engine),
        rows=_table(_run_rows(facts)),
    )
    return _card(body, model, origin=origin, facts=facts, library="peft", tags=[])


def _card(
    body: str, model: Decoder, origin: Origin, facts: Document, library: str, tags: list[str]
) -> bytes:
    """Return a card with its metadata."""
    from huggingface_hub import ModelCard, ModelCardData  # noqa: PLC0415  optional

    names = [name for _, name in facts["recipes"]] if facts else [model.recipe.name]
    card_tags = ["te-models", "transformer-engine", *dict.fromkeys(names)]
    if facts.get("lora"):
        card_tags.append("lora")
    data = ModelCardData(
        library_name=library,
        pipeline_tag="text-generation",
        base_model=facts.get("base_model") or base_on_hub(origin),
        datasets=facts.get("datasets") or None,
        license=facts.get("license") or (license_in(origin.folder) if origin.folder else None),
        tags=[*card_tags, *tags],
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}")).encode()


def _table(rows: Document) -> str:
    return "\n".join(f"| {key} | {value} |" for key, value in rows.items())


def base_on_hub(origin: Origin) -> str | None:
    """Return the name on the hub of the model that another one was made of; None if it is not known."""
    match = _HUB_CACHE.search(str(origin.folder)) if origin.folder is not None else None
    if match:
        return f"{match[1]}/{match[2]}"
    base = (origin.trained or {}).get("base_model")
    return base if isinstance(base, str) else None


def license_in(folder: Path) -> str | None:
    """Return the license that the model card in a folder names."""
    if not (folder / CARD).is_file() or importlib.util.find_spec("huggingface_hub") is None:
        return None
    import yaml  # noqa: PLC0415  with huggingface_hub
    from huggingface_hub import metadata_load  # noqa: PLC0415

    try:
        # ModelCard.load warns about a card without metadata.
        data = metadata_load(folder / CARD) or {}
    except (OSError, ValueError, yaml.YAMLError):  # no metadata that can be read
        return None
    license = data.get("license")
    return license if isinstance(license, str) else None


def _facts(model: Decoder, origin: Origin) -> Fields:
    """Return the facts of the run that trained the model; empty if none did that is known."""
    if origin.trained is not None:
        facts = dict(origin.trained)
        # Facts without recipes: the whole run then counts as one under the present recipe.
        facts.setdefault("recipes", [[1, model.recipe.name]])
        return facts
    result = _saved_result(origin.folder)
    return {**result, "recipes": [[1, model.recipe.name]]} if result else {}


def _intro(model: Decoder, facts: Document) -> str:
    """Return the sentence that a card begins with: what was trained, and how."""
    dtype = str(model.dtype).removeprefix("torch.")
    size = f"{model.config.num_parameters:,} parameters in {dtype}"
    if not facts:
        where = f"under the recipe `{model.recipe.name}` on the engine `{model.engine}`"
        return f"{size}, written by te-models, which has not trained them, from a model {where}."
    under = _under(facts["recipes"])
    how_trained = "trained" if facts.get("command") != "pretrain" else "trained from random weights"
    lora = facts.get("lora")
    if lora:
        how_trained = (
            f"trained with LoRA adapters of rank {lora['rank']}, which are merged into the weights,"
        )
    return f"{size}, {how_trained} with te-models {under} on the engine `{facts.get('engine', model.engine)}`."


def _under(recipes: Sequence[Sequence[Any]]) -> str:
    """Return the recipes of a run, [first step, name] each, in words."""
    under = f"under the recipe `{recipes[0][1]}`"
    for first, name in recipes[1:]:
        under += f" until step {first - 1:,}, then `{name}`"
    return under


def _rows(model: Decoder, config: Document) -> Fields:
    """Return the card's rows about recipe, engine and shape."""
    recipe = model.recipe
    linears = model.precision.linears.values()
    low = sum(linear.recipe is not None for linear in linears)
    fields = {}
    for key, value in recipe.to_dict().items():
        if key not in ("name", "scheme"):
            fields[key] = value
    quantization = config.get("quantization_config")
    return {
        "recipe": f"{recipe.scheme}, {recipe.formats}: {', '.join(f'{k}={json.dumps(v)}' for k, v in fields.items())}",
        "engine": f"{model.engine}: {model.engine_reason}",
        f"linears under `{recipe.name}`": f"{low} of {len(linears)} below BF16",
        "architecture": f"{', '.join(config.get('architectures') or [config['model_type']])}, "
        f"attention gate: {model.config.attention_gate}",
        "context": f"{model.config.max_position_embeddings:,} tokens",
        "vocabulary": f"{model.config.vocab_size:,} tokens",
        "stored weights": quantization.get("format", quantization["quant_method"])
        if quantization
        else "not quantized",
    }


def _run_rows(facts: Document) -> dict[str, str]:
    """Return the card's rows about the run that trained the model."""
    rows = {}
    # A pretrained model has a base too, by the name of its shape.
    if facts.get("base") and facts.get("command") != "pretrain":
        rows["base model"] = f"{facts.get('base_model') or facts['base']}"
    if lora := facts.get("lora"):
        targets = ", ".join(f"`{name}`" for name in lora["targets"])
        rows["LoRA"] = (
            f"rank {lora['rank']}, alpha {lora['alpha']:g}, dropout {lora['dropout']:g}, on {targets}"
        )
        kinds = [name for key, name in (("dora", "DoRA"), ("rslora", "rsLoRA")) if lora.get(key)]
        if kinds:
            rows["LoRA"] = f"{' and '.join(kinds)}, {rows['LoRA']}"
        if lora.get("whole"):
            rows["LoRA"] += f"; fully trained: {', '.join(lora['whole'])}"
    if facts.get("data"):
        rows["training data"] = ", ".join(map(str, facts["data"]))
    if "step" in facts:
        rows["steps"] = f"{facts['step']}"
    if "tokens" in facts:
        rows["tokens"] = f"{facts['tokens']:,}"
    for name, label in LOSSES.items():
        if isinstance(facts.get(name), float):
            rows[label] = f"{facts[name]:.4f} nats per token"
    if facts.get("best_step") and facts["best_step"] != facts.get("step"):
        # The card is of the folder's weights, the last ones, and readers would take the lowest loss for theirs.
        rows["lowest eval loss"] += f", at step {facts['best_step']}: these are not its weights"
    before = facts.get("before")
    if before:
        rows["trained before"] = (
            f"{before.get('step', 0):,} steps, from {before.get('base', 'random weights')}"
        )
    return rows


def _saved_result(source: Path | None) -> Fields:
    """Return the figures of the training run whose checkpoint the model was read from."""
    file = source / "training.json" if source is not None else None
    if file is None or not file.is_file():
        return {}
    document = read_json(file)
    result = document.get("result") if isinstance(document, dict) else None
    return result if isinstance(result, dict) else {}
