"""TEModelsConfig: a ModelConfig, and how to build the model, as a config of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from te_models.config.model import ModelConfig, config_fields
from te_models.errors import UsageError, needs
from te_models.files.formats import Fields
from te_models.huggingface.cache import add_layer_kinds
from te_models.interop.hf_families import family_of
from te_models.interop.quantized import CONFIG_KEYS
from te_models.model.options import BuildOptions

with needs("TEModelsForCausalLM", "transformers", "5.14", "hf"):
    from transformers.configuration_utils import PreTrainedConfig

MODEL_TYPE = "te_models"


class TEModelsConfig(PreTrainedConfig):
    """The config of TEModelsForCausalLM: every field of ModelConfig, under its own name.

    Args:
        values: fields of ModelConfig; keywords of CausalLM such as `recipe="current"`, which say how
            `AutoModelForCausalLM.from_config` builds the model; and the fields of transformers' PreTrainedConfig.

    Raises:
        ConfigError: sizes that are missing or do not fit each other.
    """

    model_type = MODEL_TYPE
    # The name since transformers 5.24, and before.
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    has_no_defaults_at_init = True
    output_router_logits = False  # as in transformers' families with experts; read by TRL
    # In place of a property of the base class that rewrites it as rope_parameters.
    rope_scaling = None
    # Registers the model class (te_models.huggingface.registration).
    on_first_use: ClassVar[list[Callable[[], None]]] = []

    def __init__(self, **values: Any) -> None:
        shape = {}
        for name in (*config_fields(), "rope_parameters"):
            if name in values:
                shape[name] = values.pop(name)
        resolved = ModelConfig.from_dict(shape)
        self.use_cache = bool(values.pop("use_cache", True))
        self.auto_map: dict[str, str] = {}  # read by TRL
        balance = values.pop("router_aux_loss_coef", None)
        values.setdefault("architectures", ["TEModelsForCausalLM"])
        super().__init__(**values)
        for name, value in resolved.to_dict().items():
            setattr(self, name, value)
        if balance is not None:
            self.router_aux_loss_coef = balance
        add_layer_kinds(resolved)
        for call in self.on_first_use:
            call()

    # Fields of experts under the names that they have in transformers' families, where TRL reads and sets them.

    @property
    def num_experts(self) -> int:
        return self._of_experts("num_experts")

    @property
    def num_experts_per_tok(self) -> int:
        return self._of_experts("num_experts_per_tok")

    @property
    def router_aux_loss_coef(self) -> float:
        return self._of_experts("router_aux_loss_coef")

    @router_aux_loss_coef.setter
    def router_aux_loss_coef(self, factor: float) -> None:
        self._of_experts("router_aux_loss_coef")
        self.moe = {**self.moe, "router_aux_loss_coef": factor}

    def _of_experts(self, name: str) -> Any:
        if self.__dict__.get("moe") is None or "sparse" not in (self.mlp_layer_types or ["sparse"]):
            raise AttributeError(f"{type(self).__name__} has no {name}: the model has no experts")
        return self.moe[name]

    @classmethod
    def get_config_dict(cls, *place: Any, **options: Any) -> tuple[Fields, Fields]:
        """Return the values of a config.json, and `options` without its own.

        The config of a family of Hugging Face is translated: peft reads the config of the base model of adapters.
        """
        values, options = super().get_config_dict(*place, **options)
        if values.get("model_type", MODEL_TYPE) != MODEL_TYPE:
            document = {name: value for name, value in values.items() if name not in CONFIG_KEYS}
            values = {"model_type": MODEL_TYPE, **family_of(document).read(document).to_dict()}
        return values, options

    @classmethod
    def of(cls, config: ModelConfig | None, **values: Any) -> TEModelsConfig:
        """Return the config with the shape `config`; `values` as in the constructor.

        Raises:
            UsageError: `config` is of another kind, such as the config of a model of transformers, or None.
        """
        if not isinstance(config, ModelConfig):
            raise UsageError(
                f"the model's config is a {type(config).__name__}, not a ModelConfig: give a CausalLM"
            )
        return cls(**config.to_dict(), **values)

    def model_config(self) -> ModelConfig:
        """Return the shape, as it is now."""
        return ModelConfig.from_dict({name: getattr(self, name) for name in config_fields()})

    def build_options(self) -> Fields:
        """Return the keywords of CausalLM that were given."""
        options = {}
        for name in BuildOptions.__annotations__:
            if name in self.__dict__:
                options[name] = self.__dict__[name]
        return options
