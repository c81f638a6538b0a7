"""The options of generation, by name and type, with their defaults and checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from typing_extensions import TypedDict

from te_models.errors import UsageError, check_known, field_values, mistyped

# Options of transformers' generate that this one has not.
OF_TRANSFORMERS = frozenset(
    (
        "assistant_model",
        "bad_words_ids",
        "constraints",
        "diversity_penalty",
        "early_stopping",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "force_words_ids",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "generation_config",
        "guidance_scale",
        "length_penalty",
        "logits_processor",
        "min_length",
        "min_new_tokens",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "penalty_alpha",
        "prefix_allowed_tokens_fn",
        "prompt_lookup_num_tokens",
        "repetition_penalty",
        "return_dict_in_generate",
        "sequence_bias",
        "stopping_criteria",
        "streamer",
        "suppress_tokens",
        "typical_p",
    )
)


class GenerationOptions(TypedDict, total=False):
    """Keywords of `CausalLM.generate`, `CausalLM.stream` and `stream_text`; `GenerationSettings` has the defaults.

    do_sample: sample instead of taking the likeliest token; the next five options set how, and need it.
    temperature: divisor of the logits; 0 takes the likeliest token, as without do_sample.
    top_k: sample among this many likeliest tokens.
    top_p: sample from the smallest set of tokens that has this probability.
    min_p: sample among the tokens with at least this share of the likeliest token's probability.
    seed: seed of the random numbers; None draws one from PyTorch's, which torch.manual_seed governs.
    eos_token_id: ids that end a row; "config" for the model's own, None for none.
    stop_strings: texts that end a row once its new text, as decoded by the tokenizer, contains one.
    use_cache: False recomputes the whole sequence for each token.
    cuda_graph: replay the steps from a CUDA graph; "auto" does so on a CUDA device. The tokens are the same.
    """

    do_sample: bool
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    eos_token_id: int | Iterable[int] | Literal["config"] | None
    stop_strings: str | Sequence[str]
    use_cache: bool
    cuda_graph: bool | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """GenerationOptions with defaults for those that were not given.

    Raises:
        UsageError: a value is out of range.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    eos_token_id: int | Iterable[int] | Literal["config"] | None = "config"
    stop_strings: str | Sequence[str] = ()
    use_cache: bool = True
    cuda_graph: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        check_known("cuda_graph", str(self.cuda_graph), ("auto", "True", "False"))
        if self.temperature == 0 and not isinstance(self.temperature, bool):
            greedy = dict(do_sample=False, temperature=1.0)
            # Programs give these whatever the temperature is.
            unused = dict(top_k=None, top_p=None, min_p=None, seed=None)
            for name, value in (greedy | unused).items():
                object.__setattr__(self, name, value)
        if problem := next(self._problems(), ""):
            raise UsageError(problem)

    def _problems(self) -> Iterator[str]:
        """Yield a line for each mistake, with its remedy."""
        values = field_values(self)
        advice = "give do_sample=True too (no --greedy, no --temperature 0), or leave it out"
        for name in ("temperature", "top_k", "top_p", "min_p"):
            value = values[name]
            if value is not None and (
                expected := mistyped(value, int if name == "top_k" else float)
            ):
                yield f"{name}={value!r} is of a wrong type: give {expected}"
            elif value not in (None, 1) and not self.do_sample and value > 0:
                yield f"{name}={value} does not change which token is likeliest: {advice}"
        if self.seed is not None and not self.do_sample:
            yield f"seed={self.seed} draws nothing, since the likeliest token is taken: {advice}"
        if self.temperature <= 0:
            yield f"temperature={self.temperature} is negative: give a positive number, or 0 for the likeliest token"
        if self.top_k is not None and self.top_k < 1:
            yield f"top_k={self.top_k} leaves no token: give 1 or more"
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p)):
            if value is not None and not 0 < value <= 1:
                yield f"{name}={value} is not a probability above 0: give at most 1"
        if self.cuda_graph is True and not self.use_cache:
            yield "cuda_graph=True needs the cache: leave out use_cache=False"
        if not all(self.endings):
            yield "a stop string is empty: it would end every row at once"

    @property
    def endings(self) -> tuple[str, ...]:
        """`stop_strings` as a tuple."""
        return (
            (self.stop_strings,) if isinstance(self.stop_strings, str) else tuple(self.stop_strings)
        )


def complete(options: GenerationOptions) -> GenerationSettings:
    """Return the options with defaults for those that were not given.

    Raises:
        UsageError: an unknown option (the message names the nearest) or a value out of range.
    """
    known = [
        *(field.name for field in fields(GenerationSettings)),
        "max_new_tokens",
        "attention_mask",
        "tokenizer",
    ]
    for name in options:
        if name in OF_TRANSFORMERS:
            raise UsageError(
                f"{name} is an option of transformers' generate: call TEModelsForCausalLM.wrap(model).generate"
            )
        check_known("option of generation", name, known)
    return GenerationSettings(**options)
