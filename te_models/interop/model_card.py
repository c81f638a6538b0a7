"""The model card (README.md) of a folder for transformers, in the form of the Hugging Face hub."""

import importlib.util
import json
import re
from pathlib import Path

from te_models.files.formats import Document, Fields, read_json
from te_models.model.decoder import Decoder

CARD = "README.md"
MARK = "<!-- Written by te-models, which replaces this file on the next save unless you delete this line. -->"
_HUB_CACHE = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/[^/]+/?$")

_BODY = """{mark}

# {title}

{parameters:,} parameters in {dtype}, trained with te-models under the recipe `{recipe}` on the engine `{engine}`.

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


def user_card(folder: Path) -> bytes | None:
    """Return the card in a folder if te-models did not write it, or if its user has claimed it since."""
    path = folder / CARD
    content = path.read_bytes() if path.is_file() else MARK.encode()
    return None if MARK.encode() in content else content


def model_card(
    model: Decoder, source: Path | None, config: Document, name: str, code: bool
) -> bytes | None:
    """Return the card of a model that was read from the folder `source`; None without the package huggingface_hub.

    `config` is the config.json that is written with it, `name` that of the folder or repository, and `code` whether the
    folder holds code that transformers needs.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import ModelCard, ModelCardData  # noqa: PLC0415

    recipe = model.recipe
    base = _HUB_CACHE.search(str(source)) if source is not None else None
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=f"{base[1]}/{base[2]}" if base else None,
        tags=["te-models", "transformer-engine", recipe.name, *(["custom_code"] if code else [])],
    )
    body = _BODY.format(
        mark=MARK,
        title=name.rpartition("/")[2],
        parameters=model.config.num_parameters,
        dtype=str(model.dtype).removeprefix("torch."),
        recipe=recipe.name,
        engine=model.engine,
        rows="\n".join(
            f"| {key} | {value} |"
            for key, value in {**_rows(model, config), **_losses(source)}.items()
        ),
        name=name,
        options=", trust_remote_code=True" if code else "",
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}")).encode()


def _rows(model: Decoder, config: Document) -> Fields:
    """Return the card's rows about recipe, engine and shape."""
    recipe, linears = model.recipe, model.precision.linears.values()
    low = sum(linear.recipe is not None for linear in linears)
    fields = {
        key: value for key, value in recipe.to_dict().items() if key not in ("name", "scheme")
    }
    quantization = config.get("quantization_config")
    return {
        "recipe": f"{recipe.scheme}, {recipe.formats}: {', '.join(f'{k}={json.dumps(v)}' for k, v in fields.items())}",
        "engine": f"{model.engine}: {model.engine_reason}",
        "linears in training": f"{low} of {len(linears)} below BF16",
        "architecture": f"{', '.join(config.get('architectures') or [config['model_type']])}, "
        f"attention gate: {model.config.attention_gate}",
        "context": f"{model.config.max_position_embeddings:,} tokens",
        "vocabulary": f"{model.config.vocab_size:,} tokens",
        "stored weights": quantization.get("format", quantization["quant_method"])
        if quantization
        else "not quantized",
    }


def _losses(source: Path | None) -> dict[str, str]:
    """Return the figures of the training run whose checkpoint the model was read from."""
    file = source / "training.json" if source is not None else None
    if file is None or not file.is_file():
        return {}
    document = read_json(file)
    result = document.get("result") if isinstance(document, dict) else None
    if not isinstance(result, dict):
        return {}
    names = {
        "first_eval_loss": "eval loss before training",
        "eval_loss": "eval loss after",
        "loss": "last training loss",
    }
    losses = {label: result.get(name) for name, label in names.items()}
    found = {
        label: f"{value:.4f} nats per token"
        for label, value in losses.items()
        if isinstance(value, float)
    }
    return {"steps": str(result.get("step")), **found} if found else {}
