"""The part of a family of Hugging Face with experts: its keys of config.json, read and written. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from te_models.config.model import ModelConfig
from te_models.errors import ConfigError, field_values
from te_models.interop.hf_expert_layouts import Layout
from te_models.interop.hf_parts import ConfigKeys, Fields, Values

COUNTS = ("num_local_experts", "num_experts")


@dataclass(frozen=True)
class _ExpertKeys:
    """The keys of a family with experts; its fields are the arguments of `experts`."""

    layout: Layout
    keys: Mapping[str, str]
    number: str
    shared_count: str
    without: Values | None
    constants: Fields

    @property
    def aliases(self) -> list[str]:
        """The other keys by which transformers reads the number of experts."""
        return [name for name in COUNTS if name != self.number]

    @property
    def names(self) -> tuple[str, ...]:
        """Every key that is read or written, once."""
        names = [self.number, *self.aliases, *self.keys.values(), *self.layout.keys]
        if self.shared_count:
            names.append(self.shared_count)
        return tuple(dict.fromkeys(names))

    def read(self, theirs: Values) -> Fields:
        """Return our fields from a config.json; none for a model without experts."""
        dense = self.layout.read(theirs)
        number = next((name for name in (*self.aliases, self.number) if name in theirs), None)
        count = None if number is None else theirs[number]
        # Such a file still has sizes of experts, which must not make a config that differs from a dense model's.
        if all(dense) or (count == 0 and self.without is not None):
            return {}
        if not isinstance(count, int):
            raise ConfigError(f"it lacks {self.number}")
        moe: Fields = {**self.constants, "num_experts": count}
        for field, key in self.keys.items():
            if key in theirs:
                moe[field] = theirs[key]
        if self.shared_count:
            # They count shared experts of one expert's width; te-models has one, as wide as all of them.
            width = moe["moe_intermediate_size"]
            moe["shared_expert_intermediate_size"] = theirs[self.shared_count] * width
        types = ["dense" if is_dense else "sparse" for is_dense in dense] if any(dense) else None
        return {"moe": moe, "mlp_layer_types": types}

    def write(self, config: ModelConfig) -> Fields:
        """Return the keys of a model with experts, or `without` for one that has none."""
        if config.moe is None:
            if self.without is None:
                raise ConfigError("a family with experts writes no model without them")
            return {**self.without, **self.layout.write([True] * config.num_hidden_layers)}
        values = field_values(config.moe)
        theirs: Fields = {self.number: config.moe.num_experts}
        for field, key in self.keys.items():
            theirs[key] = values[field]
        if self.shared_count:
            width = config.moe.moe_intermediate_size
            theirs[self.shared_count] = config.moe.shared_expert_intermediate_size // width
        kinds = config.mlp_layer_types or ["sparse"] * config.num_hidden_layers
        return theirs | self.layout.write([kind == "dense" for kind in kinds])


def experts(
    layout: Layout,
    keys: Mapping[str, str],
    *,
    number: str = "num_experts",
    shared_count: str = "",
    without: Values | None = None,
    **constants: object,
) -> ConfigKeys:
    """Return the part of a family with experts.

    Args:
        layout: which layers are dense.
        keys: field of MoEConfig -> their key, of those that differ between models.
        number: their key for the number of experts; transformers reads the keys of COUNTS as the same.
        shared_count: their key for the number of experts that all tokens go through, each as wide as another; "": none.
        without: the keys to write, beside the layout, for a model without experts; None: the family has no such model.
        constants: fields of MoEConfig that all models of the family share.
    """
    part = _ExpertKeys(layout, keys, number, shared_count, without, constants)
    return ConfigKeys(part.names, part.read, part.write)
