"""One family of Hugging Face's decoders as data: how its config.json is read and written. No torch."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, replace
from typing import Any

from te_models.config.model import ModelConfig
from te_models.errors import ConfigError
from te_models.interop.hf_common_keys import COPIED, HARMLESS, NULLABLE, SIZES
from te_models.interop.hf_parts import ConfigKeys, Fields, Values
from te_models.interop.hf_places import Rows
from te_models.interop.hf_rope_parts import unread_rope_fields


# Without eq a family equals itself only, and has a hash, which the dicts among its fields have not.
@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """One architecture of Hugging Face.

    Attributes:
        model_type, architecture: as in config.json.
        models: names of published models, for people.
        copied: our fields among COPIED -> their key in config.json, where it has another name.
        norm, embedding, blocks: names of the last norm, of the embedding and of the list of layers, below `root`.
        modules: fields of this class (`norm`, `embedding`, `blocks`, `layer`) -> their value in a model of
            transformers, where it differs from the one in a folder.
        stated: a function from a config.json to one with the keys that other keys imply.
        layer: name of a tensor below "model.layers.<i>." -> the rows of our parameter that it fills.
        parts: keys that need more than copying.
        spellings: names in `layer` -> names that some folders have in their place.
        constants: values of our fields that all models of the family share.
        defaults: the values that transformers uses for absent keys.
        only: key -> the values that te-models supports; other values are refused.
        ignored: keys that change nothing in a model that is accepted.
        when: keys of the text model -> the values that select this family among the families of its model_type, whose
            tensors differ; None among the values: the key may be absent.
        marks: keys that distinguish the family from others of its model_type.
        written: False if transformers has no code for the family: then only models that were read as this family are
            written as it.
        accepts: a function that says whether transformers accepts a model, for models that were not read as this
            family but that its keys can express.
        inner: the key of config.json that holds the description of the text model; "": it is not nested.
        flat: keys that belong to other models in a config.json without `inner`, which earlier versions of transformers
            wrote; (): there are no such files.
        text_type: the model_type below `inner`, where families of one outer model_type differ in it.
        inside: the prefix of the names of layers in a multimodal model of transformers.
        root: the prefix of the names of embedding, layers and last norm.
        head: the name of the head.
        other_models: prefixes of the tensors of other models in the folder, such as a vision tower; they are written
            back unchanged.
        absent: suffixes of tensors that a release may lack; they are zero then.
        unused: a function from the text model's config to the prefixes, below `root`, of tensors that transformers does
            not load.
        later: prefixes of the tensors of multi-token prediction, which are written back where a folder has them.
        stacked: where its experts are one tensor per projection, the order of their dimensions, INPUTS_FIRST or
            OUTPUTS_FIRST of te_models.interop.stacked_experts; "": each expert has tensors of its own.
        stacks: suffixes of such tensors in a folder, where they lack "experts" -> the suffix with it.
        inputs_first: whether experts in a model of transformers are [experts, in, out], and not [experts, out, in].
        swapped_by_peft: whether peft takes those inputs for outputs, since the model lacks `is_transposed`.
        code: whether its folders come with te-models' own code for transformers (te_models.interop.remote_code).
        scaled_vectors: whether its embedding in transformers scales its output, so that `inputs_embeds` are scaled.
        mlp: the name of the module with the experts and their router, below a layer of a model of transformers.
        experts: the name of the experts there, where it is not `mlp`.experts.
        renamed: parts of names in a folder -> those in a model of transformers.
        served: a function from a model's config to the keys that servers read beside those that `write` writes.
        sign: `marks` in words, for people.
        note: the family's peculiarities, for people.
    """

    model_type: str
    architecture: str
    models: str
    layer: Mapping[str, Rows]
    parts: tuple[ConfigKeys, ...]
    constants: Values = field(default_factory=dict)
    defaults: Values = field(default_factory=dict)
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    when: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    written: bool = True
    accepts: Callable[[ModelConfig], bool] = lambda config: True
    inner: str = ""
    flat: tuple[str, ...] = ()
    text_type: str = ""
    copied: Mapping[str, str] = field(default_factory=dict)
    spellings: Mapping[str, str] = field(default_factory=dict)
    norm: str = "norm"
    embedding: str = "embed_tokens"
    blocks: str = "layers"
    modules: Mapping[str, Any] = field(default_factory=dict)
    stated: Callable[[Values], Values] = lambda config: config
    inside: str = "model.language_model."
    root: str = "model."
    head: str = "lm_head"
    other_models: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    unused: Callable[[Values], tuple[str, ...]] = lambda text: ()
    later: tuple[str, ...] = ()
    stacked: str = ""
    stacks: Mapping[str, str] = field(default_factory=dict)
    inputs_first: bool = False
    swapped_by_peft: bool = False
    code: bool = False
    scaled_vectors: bool = False
    mlp: str = "mlp"
    experts: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    served: Callable[[ModelConfig], Values] = lambda config: {}
    sign: str = ""
    note: str = ""

    @property
    def expert_module(self) -> str:
        """The name of the experts below a layer of a model of transformers."""
        return self.experts or f"{self.mlp}.experts"

    def read(self, config: Values) -> ModelConfig:
        """Return the ModelConfig of a config.json.

        Raises:
            ConfigError: the file lacks a size, or asks for something that te-models does not support; it names all.
        """
        config = self.text(config)
        problems = self._unsupported(config)
        for key in SIZES:
            if isinstance(config.get(key, self.defaults.get(key)), int):
                continue
            if key in config:
                problems.append(f"{key}={config[key]!r} is not a whole number")
            else:
                problems.append(f"it lacks {key}")
            raise ConfigError("; ".join(problems))  # nothing else can be read without the sizes
        # A null among these is a statement, such as having no eos token.
        stated = {**self.defaults, **config}
        ours = {key: stated[theirs] for key, theirs in self.keys.items() if theirs in stated}
        if isinstance(ours.get("pad_token_id"), int) and ours["pad_token_id"] < 0:
            ours["pad_token_id"] = None  # some files say so with -1
        theirs = dict(self.defaults)
        for key, value in config.items():
            # Another null means that the key is absent.
            if value is not None or key in NULLABLE:
                theirs[key] = value
        for part in self.parts:
            try:
                ours |= part.read(theirs)
            except ConfigError as error:
                problems.append(str(error))
        if not problems:
            return ModelConfig.from_dict({**ours, **self.constants})
        try:
            ModelConfig.from_dict({**ours, **self.constants})
        except ValueError as error:
            problems.append(str(error))
        raise ConfigError("; ".join(problems))

    def suits(self, config: Values) -> bool:
        """Return whether a config.json of this model_type has the values of `when`."""
        if not self.when:
            return True
        text = self.text(config)
        return all(text.get(key) in values for key, values in self.when.items())

    def text(self, config: Values) -> Values:
        """Return the part of a config.json that describes the text model."""
        if not self.inner:
            return self.stated(config)
        text = config.get(self.inner)
        if text is None and self.flat:
            return {key: value for key, value in config.items() if key not in self.flat}
        if not isinstance(text, Mapping):
            raise ConfigError(f"it lacks {self.inner}, the description of the text model")
        # Both state whether the embeddings are tied; transformers follows the outer one.
        outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        return {**text, **outer}

    def stored_as(self, names: Collection[str]) -> "Family":
        """Return the family with the prefixes of the tensors in a folder, all of which transformers reads.

        A model that was saved without its head lacks "model." in its names, and a text model that was loaded from a
        multimodal folder is saved under the multimodal model's names.

        Args:
            names: the names of all tensors in the folder.
        """
        # The family's own prefix first, so that it wins where several fit.
        roots = dict.fromkeys((self.root, *ROOTS))
        present_roots = []
        for root in roots:
            if any(name.startswith(f"{root}{self.blocks}.") for name in names):
                present_roots.append(root)
        heads = [head for head in dict.fromkeys((self.head, *HEADS)) if f"{head}.weight" in names]
        other_models: list[str] = []
        for prefix in self.other_models:
            other_models += prefixes_of(prefix)
        # Other names of the same modules in some releases.
        ends = tuple(f".{other}.weight" for other in self.spellings.values())
        layer = self.layer
        if ends and any(name.endswith(ends) for name in names):
            layer = {self.spellings.get(name, name): rows for name, rows in layer.items()}
        return replace(
            self,
            layer=layer,
            root=(present_roots or [self.root])[0],
            head=(heads or [self.head])[0],
            other_models=tuple(other_models),
        )

    def other_name(self, name: str, stored: "Family") -> str:
        """Replace the prefixes of `stored` in the name of another model's tensor by this family's, and return it."""
        layers = f"{stored.root}{self.blocks}."
        if name.startswith(layers):
            return f"{self.root}{self.blocks}.{name.removeprefix(layers)}"
        for stated_prefix in self.other_models:
            for prefix in prefixes_of(stated_prefix):
                if name.startswith(prefix):
                    return stated_prefix + name.removeprefix(prefix)
        return name

    def other_prefixes(self, config: Values) -> tuple[str, ...]:
        """Return the prefixes of the tensors in a folder that do not belong to the text model.

        They belong to other models, and to the layers behind the last one that predict later tokens.
        """
        text = self.text(config)
        count = text.get("num_nextn_predict_layers")
        last = text["num_hidden_layers"]
        later = min(count, last) if isinstance(count, int) else 0
        return (
            *self.other_models,
            *self.later,
            *(f"{self.root}{prefix}" for prefix in self.unused(text)),
            *(f"{self.root}{self.blocks}.{last + n}." for n in range(later)),
        )

    def write(self, config: ModelConfig) -> Fields:
        """Return the config.json of a model, without its dtype."""
        ours = config.to_dict()
        theirs: Fields = {their_key: ours[key] for key, their_key in self.keys.items()}
        theirs |= {key: values[0] for key, values in self.only.items()}
        for part in self.parts:
            theirs |= part.write(config)
        # A multimodal config.json has the text model's keys in a table of their own.
        header = {"architectures": [self.architecture], "model_type": self.model_type}
        if not self.inner:
            return {**header, **theirs}
        if self.text_type:
            theirs["model_type"] = self.text_type
        return {**header, "tie_word_embeddings": config.tie_word_embeddings, self.inner: theirs}

    def rewritten(self, document: Values, config: ModelConfig) -> Fields:
        """Return the config.json `document` of a model that now has the shape `config`."""
        new = self.write(config)
        known = self.known()
        if not self.inner:
            return {key: value for key, value in document.items() if key not in known} | new
        if self.flat and self.inner not in document:
            other_keys = {key: value for key, value in document.items() if key not in known}
            return {**other_keys, **_with_mrope(new.pop(self.inner), document), **new}
        text = document[self.inner]
        other_keys = {key: value for key, value in text.items() if key not in known}
        return {**document, **new, self.inner: other_keys | _with_mrope(new[self.inner], text)}

    def has_places(self, config: ModelConfig) -> bool:
        """Return whether every te.Linear of the model has a place in this architecture."""
        return not self._linears_without_place(config)

    def lacks(self, config: ModelConfig) -> list[str]:
        """List what this architecture cannot express of a model: names of te.Linears, and fields as "name=value"."""
        try:
            read = self.read(self.write(config)).to_dict()
        # A part divides by one of our numbers, or writes a config.json that `read` refuses.
        except (ArithmeticError, ValueError):
            read = {}
        fields = []
        for name, value in config.to_dict().items():
            if read.get(name, MISSING) != value:
                fields.append(f"{name}={value!r}")
        return [*sorted(self._linears_without_place(config)), *fields]

    def _linears_without_place(self, config: ModelConfig) -> set[str]:
        """Return the te.Linears of a model that no tensor of this architecture fills."""
        placed: set[str] = set()
        for rows in self.layer.values():
            placed.update(rows.modules)
        linears: set[str] = set()
        for layer in config.layers:
            linears.update(layer.linears)
        return linears - placed

    @property
    def keys(self) -> dict[str, str]:
        """Our fields whose values are copied -> their keys."""
        return {name: self.copied.get(name, name) for name in COPIED}

    @property
    def module_root(self) -> str:
        """The prefix of the names of layers in a model of transformers, and in adapters for it."""
        return self.inside if self.inner else "model."

    def in_models(self, root: str) -> "Family":
        """Return the family with the names of modules in a model of transformers, below `root`."""
        return replace(self, root=root, head="lm_head", **self.modules)

    def as_stack(self, name: str) -> str:
        """Return the name of a tensor of a folder, with "experts" added if it is a stack of experts without it."""
        for stored, stack in self.stacks.items():
            if name.endswith(stored):
                return name.removesuffix(stored) + stack
        return name

    def as_stored(self, name: str) -> str:
        """Return the name that a stack has in a folder, the inverse of `as_stack`."""
        for stored, stack in self.stacks.items():
            if name.endswith(stack):
                return name.removesuffix(stack) + stored
        return name

    def in_transformers(self, name: str) -> str:
        """Return the name of a tensor in a model of transformers, given its name in a folder."""
        for stored, there in self.renamed.items():
            name = name.replace(stored, there)
        return name

    def known(self) -> set[str]:
        """Return the keys that `write` writes or a part reads."""
        return {*self.keys.values(), *self.only, *(key for part in self.parts for key in part.keys)}

    def unread(self, config: Values) -> list[str]:
        """Return the keys of a config.json that transformers does not read for this family: they change nothing.

        Keys without a value are left out, and bookkeeping such as "transformers_version".
        """
        text = self.text(config)
        read = {*self.known(), *HARMLESS, *SHARED, *self.ignored}
        unread = []
        for key, value in text.items():
            # A key that is switched off has no effect in any family.
            if value is None or value is False:
                continue
            if key not in read and not key.startswith(("_", "unsloth_")):
                unread.append(key)
        return unread + unread_rope_fields(text)

    def _unsupported(self, config: Values) -> list[str]:
        """Return a line per key that transformers reads and whose value te-models does not support."""
        problems = []
        known = self.known() | self.ignored
        for key, value in config.items():
            shown = repr(value) if len(repr(value)) < 80 else f"{repr(value)[:77]}..."
            refused = f"{key}={shown} is not supported for {self.model_type}: te-models"
            if key in self.only and value not in self.only[key]:
                problems.append(f"{refused} computes {' or '.join(map(repr, self.only[key]))}")
            elif key not in known and key in SHARED and not SHARED[key](value):
                problems.append(f"{refused} does not compute it, and transformers reads it")
        for name in config.get("architectures") or ():
            # "Qwen3Model" is a model that was saved without its head.
            if name != self.architecture and not str(name).endswith(("ForCausalLM", "Model")):
                problems.append(
                    f"architectures={name!r} is not supported: te-models reads {self.architecture}"
                )
        return problems


def _with_mrope(new: Fields, document: Values) -> Fields:
    """Return the text model's keys `new` with the fields of M-RoPE that `document` has.

    They divide RoPE's channels among three positions, which a text model has no use for.
    """
    rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
    mrope = {name: value for name, value in rope.items() if name.startswith("mrope_")}
    if not mrope:
        return new
    return {**new, "rope_parameters": {**new["rope_parameters"], **mrope}}


def _all_full(types: object) -> bool:
    return types is None or set(types) == {"full_attention"}  # type: ignore[arg-type]  # a list in a config.json


# Keys that transformers' caches and masks read for every family -> whether a value changes nothing.
SHARED: Mapping[str, Callable[[object], bool]] = {
    "layer_types": _all_full,
    "sliding_window": lambda size: size is None,
    "attention_chunk_size": lambda size: size is None,
    "is_causal": lambda flag: flag is not False,
    "kv_sharing_modes": lambda modes: not modes,
    "num_kv_shared_layers": lambda count: not count,
    "per_layer_config": lambda configs: not configs,
    "is_encoder_decoder": lambda flag: not flag,
}

# Prefixes of the names of layers, and names of the head, in folders that transformers reads.
ROOTS = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
HEADS = ("lm_head", "language_model.lm_head")


def prefixes_of(prefix: str) -> tuple[str, ...]:
    """Return a prefix of tensors of other models, with and without "model." in front."""
    bare = prefix.removeprefix("model.")
    return tuple(dict.fromkeys((prefix, f"model.{bare}", bare)))


def whole_heads(config: ModelConfig) -> bool:
    """Return whether the hidden size is a multiple of the number of heads, as some families' configs demand."""
    return config.hidden_size % config.num_attention_heads == 0


NO_DROPOUT = {"attention_dropout": (0.0,)}
UNGATED = {"attention_gate": "none"}
LENGTHS = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
# The text model of a folder that has other models too, such as one for images. No other model is written as such.
TEXT_ALONE: Fields = dict(
    inner="text_config",
    accepts=lambda config: False,
    note="the text model of a folder whose other tensors are kept aside and written back",
)
