"""Every method of peft on a TEModelsForCausalLM: as on the model of transformers with the same weights, or refused."""

import copy
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fewer import every
from hf_models import make_theirs
from judge import transformers
from torch import Tensor

from te_models import CausalLM, TEModelsForCausalLM

pytest.importorskip("transformers", minversion="5.14")
peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.filterwarnings("ignore")]

IDS = torch.randint(12, 60, (2, 11), generator=torch.Generator().manual_seed(0))
IDS[:, 3:5] = torch.tensor([5, 6])  # what an activated LoRA waits for
CLOSE: dict[str, Any] = dict(rtol=0, atol=1e-4)
QV = ["q_proj", "v_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
MLP_INPUTS = ["down_proj", "gate_proj"]
IA3 = ["k_proj", "v_proj", *MLP_INPUTS]
NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]

# PeftType -> its config's class and fields.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "LORA": ("LoraConfig", dict(r=4, target_modules=ALL)),
    "ADALORA": ("AdaLoraConfig", dict(init_r=4, total_step=10, target_modules=ALL)),
    "ADAMSS": ("AdamssConfig", dict(r=8, num_subspaces=2, target_modules=QV)),
    "BOFT": ("BOFTConfig", dict(boft_block_size=4, target_modules=ALL)),
    "IA3": ("IA3Config", dict(target_modules=IA3, feedforward_modules=MLP_INPUTS)),
    "BEFT": ("BeftConfig", dict(target_modules=["v_proj"])),
    "LILY": ("LilyConfig", dict(r=4, target_modules=ALL)),
    "LOHA": ("LoHaConfig", dict(r=4, target_modules=ALL)),
    "LOKR": ("LoKrConfig", dict(r=4, target_modules=ALL)),
    "OFT": ("OFTConfig", dict(oft_block_size=8, target_modules=ALL)),
    "POLY": ("PolyConfig", dict(r=4, n_tasks=2, n_skills=2, target_modules=ALL)),
    "LN_TUNING": ("LNTuningConfig", dict(target_modules=NORMS)),
    "VERA": ("VeraConfig", dict(r=8, target_modules=QV)),
    "FROD": ("FrodConfig", dict(target_modules=["o_proj", "q_proj"], progressbar=False)),
    "PVERA": ("PveraConfig", dict(r=8, target_modules=QV)),
    "FOURIERFT": ("FourierFTConfig", dict(n_frequency=20, target_modules=ALL)),
    "HRA": ("HRAConfig", dict(r=4, target_modules=ALL)),
    "VBLORA": ("VBLoRAConfig", dict(r=2, num_vectors=16, vector_length=16, topk=2, target_modules=ALL)),
    "UNILORA": ("UniLoraConfig", dict(r=4, theta_d_length=64, target_modules=ALL)),
    "MISS": ("MissConfig", dict(r=4, target_modules=ALL)),
    "RANDLORA": ("RandLoraConfig", dict(r=8, target_modules=QV)),
    "ROAD": ("RoadConfig", dict(group_size=8, target_modules=ALL)),
    "TRAINABLE_TOKENS": ("TrainableTokensConfig", dict(token_indices=IDS[0, :3].tolist())),
    "HIRA": ("HiraConfig", dict(r=4, target_modules=ALL)),
    "SHIRA": ("ShiraConfig", dict(r=4, random_seed=3, target_modules=ALL)),
    "C3A": ("C3AConfig", dict(block_size=16, target_modules=ALL)),
    "WAVEFT": ("WaveFTConfig", dict(n_frequency=20, target_modules=ALL)),
    "OSF": ("OSFConfig", dict(effective_rank=8, target_modules=ALL)),
    "DELORA": ("DeloraConfig", dict(r=4, target_modules=ALL)),
    "GRALORA": ("GraloraConfig", dict(r=4, gralora_k=2, target_modules=ALL)),
    "TINYLORA": ("TinyLoraConfig", dict(r=2, u=8, target_modules=ALL)),
    "PSOFT": ("PsoftConfig", dict(r=4, target_modules=ALL)),
    "PEANUT": ("PeanutConfig", dict(r=4, target_modules=ALL)),
    "SUPERTUNING": ("SupertuningConfig", dict(target_modules=ALL)),
    "DEFT": ("DeftConfig", dict(r=4, target_modules=ALL)),
}  # fmt: skip
# What one method does in other ways.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ia3 on inputs": ("IA3Config", dict(target_modules=ALL, feedforward_modules=["q_proj", "up_proj"])),
    "bat": ("MissConfig", dict(r=4, init_weights="bat", target_modules=QV)),
    "dora": ("LoraConfig", dict(r=4, use_dora=True, target_modules=ALL)),
    "pissa": ("LoraConfig", dict(r=4, init_lora_weights="pissa", target_modules=ALL)),
    "olora": ("LoraConfig", dict(r=4, init_lora_weights="olora", target_modules=ALL)),
    "bias of B": ("LoraConfig", dict(r=4, lora_bias=True, target_modules=["o_proj", "q_proj"])),
    "head": ("LoraConfig", dict(r=4, target_modules=["q_proj", "lm_head"])),
    "whole head": ("LoraConfig", dict(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "whole tables": (
        "LoraConfig", dict(r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
    ),
    "embedding": ("LoraConfig", dict(r=4, target_modules=["q_proj", "embed_tokens"])),
    "tokens": ("LoraConfig", dict(r=4, target_modules=["q_proj"], trainable_token_indices=IDS[0, :3].tolist())),
    "activated": ("LoraConfig", dict(r=4, target_modules=QV, alora_invocation_tokens=[5, 6])),
}  # fmt: skip
PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "PROMPT_TUNING": ("PromptTuningConfig", dict(num_virtual_tokens=3)),
    "MULTITASK_PROMPT_TUNING": ("MultitaskPromptTuningConfig", dict(num_virtual_tokens=3, num_tasks=2)),
    "P_TUNING": ("PromptEncoderConfig", dict(num_virtual_tokens=3, encoder_hidden_size=16)),
    "PREFIX_TUNING": ("PrefixTuningConfig", dict(num_virtual_tokens=3)),
    "CPT": ("CPTConfig", dict(cpt_token_ids=[3, 4, 5], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 2])),
    "CARTRIDGE": ("CartridgeConfig", dict(num_virtual_tokens=3, num_frozen_tokens=0)),
}  # fmt: skip
# Method -> what the refusal says: these replace whole blocks, or accept nothing but a plain nn.Linear.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "ADAPTION_PROMPT": (
        "AdaptionPromptConfig",
        dict(adapter_len=3, adapter_layers=1),
        "adaption prompt: 'te_models'",
    ),
    "GLORA": ("GloraConfig", dict(r=4, target_modules=ALL), "GLoRA does not support this layer"),
    "SHADOW": ("ShadowConfig", dict(r=4), "peft's SHADOW does not work with this model"),
}
ELSEWHERE = {"XLORA"}  # has a test of its own
EVERY = {**METHODS, **VARIANTS}


def test_the_tables_have_every_method_of_peft() -> None:
    known = {*METHODS, *PROMPTS, *REFUSED, *ELSEWHERE}
    assert {kind.value for kind in peft.PeftType} <= known


def make_config(row: tuple[str, dict[str, Any]]) -> Any:
    if not hasattr(peft, row[0]):
        pytest.skip(f"the installed peft has no {row[0]}")
    if row[0] == "AdamssConfig":
        pytest.importorskip("sklearn")
    return getattr(peft, row[0])(task_type="CAUSAL_LM", **copy.deepcopy(row[1]))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with biases on q, k and v."""
    config = transformers.Qwen2Config(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    folder = tmp_path_factory.mktemp("qwen2")
    model.save_pretrained(folder)
    return folder


def theirs(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def ours(folder: Path, **options: Any) -> TEModelsForCausalLM:
    how: dict[str, Any] = dict(recipe="bf16", dtype="float32", device="cpu")
    return TEModelsForCausalLM.from_pretrained(folder, **(how | options))


def adapted(model: Any, config: Any) -> Any:
    torch.manual_seed(1)  # of random initial values
    return peft.get_peft_model(model, copy.deepcopy(config)).eval()


def trainable(model: Any) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def shake(model: Any) -> None:
    """Add to each trainable parameter what depends on its name alone."""
    for name, parameter in trainable(model).items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.add_((0.05 * noise).to(parameter.dtype))


def options(config: Any) -> dict[str, Tensor]:
    tasks = config.peft_type.value in ("POLY", "MULTITASK_PROMPT_TUNING")
    return dict(task_ids=torch.tensor([0, 1])) if tasks else {}


def assert_equal(theirs: Any, ours: Any, config: Any) -> Tensor:
    """Compare names, logits and gradients; return the logits."""
    assert trainable(ours).keys() == trainable(theirs).keys()
    outputs = []
    for model in (theirs, ours):
        torch.manual_seed(2)  # of what a method draws
        outputs.append(model(input_ids=IDS, labels=IDS, **options(config)))
        model.zero_grad()
        outputs[-1].loss.backward()
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits, **CLOSE)
    for name, parameter in trainable(theirs).items():
        found = trainable(ours)[name].grad
        torch.testing.assert_close(found, parameter.grad, rtol=1e-3, atol=1e-4, msg=name)
    return outputs[0].logits.detach()


def outcome(step: Callable[[Any], Tensor], model: Any) -> Tensor | type[Exception]:
    """Return what a step computes with a model, or the class of the exception in which it ends."""
    torch.manual_seed(2)
    try:
        return step(model)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return type(error)


def assert_merged_alike(theirs: Any, ours: Any, config: Any) -> None:
    """Compare logits without the adapter, merged, unmerged, and merged for good; also what a method refuses."""

    def logits(model: Any) -> Tensor:
        return model(input_ids=IDS, **options(config)).logits.detach()

    def without(model: Any) -> Tensor:
        with model.disable_adapter():
            return logits(model)

    def merged(model: Any) -> Tensor:
        model.merge_adapter()
        return logits(model)

    def unmerged(model: Any) -> Tensor:
        model.unmerge_adapter()
        return logits(model)

    def unloaded(model: Any) -> Tensor:
        return model.merge_and_unload()(input_ids=IDS).logits.detach()

    for step in (without, merged, unmerged, unloaded):
        expected, found = (outcome(step, model) for model in (theirs, ours))
        if isinstance(expected, Tensor) and isinstance(found, Tensor):
            torch.testing.assert_close(found, expected, **CLOSE)
        else:
            assert found is expected, step.__name__


@pytest.mark.parametrize("method", every(8, EVERY))
def test_a_method_is_that_on_the_model_of_transformers(
    method: str, base: Path, tmp_path: Path
) -> None:
    config = make_config(EVERY[method])
    first, second = adapted(theirs(base), config), adapted(ours(base), config)
    fresh = assert_equal(first, second, config)  # initial values too
    shake(first)
    shake(second)
    tuned = assert_equal(first, second, config)
    expected_effect = 1e-3 if method == "UNILORA" else 0.02
    assert (tuned - fresh).abs().max() > expected_effect
    first.save_pretrained(tmp_path)
    again = [peft.PeftModel.from_pretrained(m(base), tmp_path).eval() for m in (theirs, ours)]
    torch.manual_seed(2)
    torch.testing.assert_close(again[1](input_ids=IDS, **options(config)).logits, tuned, **CLOSE)
    assert_merged_alike(again[0], again[1], config)


@pytest.mark.parametrize("method", PROMPTS)
def test_prompts_are_those_on_the_model_of_transformers(method: str, base: Path) -> None:
    """And generation goes on from them: peft 0.21 loses them there with a cache of transformers 5.24."""
    config = make_config(PROMPTS[method])
    first, second = adapted(theirs(base), config), adapted(ours(base), config)
    shake(first)
    shake(second)
    for model in (first, second):
        model.config.use_cache = True
    assert_equal(first, second, config)
    expected = IDS
    for _ in range(5):
        logits = second(input_ids=expected, **options(config)).logits
        expected = torch.cat((expected, logits[:, -1:].argmax(-1)), dim=1)
    mask = torch.ones_like(IDS)
    more: dict[str, Any] = dict(max_new_tokens=5, do_sample=False, eos_token_id=None)
    found = second.generate(input_ids=IDS, attention_mask=mask, **more, **options(config))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("method", REFUSED)
def test_a_method_that_cannot_work_is_refused_by_name(method: str, base: Path) -> None:
    kind, fields, message = REFUSED[method]
    config = make_config((kind, fields))
    with pytest.raises((ValueError, AttributeError), match=message):
        adapted(ours(base), config)


def test_repeated_layers_are_refused(base: Path) -> None:
    config = peft.LoraConfig(target_modules=QV, layer_replication=[[0, 2], [1, 2]])
    with pytest.raises(ValueError, match="leave out layer_replication"):
        peft.get_peft_model(ours(base), config)


def test_a_mixture_of_adapters(base: Path, tmp_path: Path) -> None:
    """XLORA scales each adapter by what the model computes of each token."""
    for seed in (0, 1):
        expert = adapted(theirs(base), make_config(METHODS["LORA"]))
        torch.manual_seed(seed)
        for parameter in trainable(expert).values():
            parameter.data.normal_(0, 0.1)
        expert.save_pretrained(tmp_path / str(seed))
    folders = {str(seed): str(tmp_path / str(seed)) for seed in (0, 1)}
    logits = []
    for model in (theirs(base), ours(base)):
        model.config.use_cache = False
        config = peft.XLoraConfig(
            task_type="CAUSAL_LM", hidden_size=64, xlora_depth=2, xlora_size=16, adapters=folders
        )
        mixture = adapted(model, config)
        shake(mixture)
        logits.append(mixture(input_ids=IDS).logits)
    torch.testing.assert_close(logits[1], logits[0], **CLOSE)


def test_an_adapter_per_row(base: Path) -> None:
    """Rows of a batch with different adapters, added one after the other, and a row with none."""
    logits = []
    for model in (theirs(base), ours(base)):
        torch.manual_seed(0)
        first = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"])
        mixed = peft.get_peft_model(model, first, adapter_name="a").eval()
        mixed.add_adapter(
            "b", peft.LoraConfig(r=4, target_modules=["v_proj", "down_proj", "lm_head"])
        )
        for name in ("a", "b"):
            mixed.set_adapter(name)
            shake(mixed)
        rows = torch.cat((IDS, IDS[:1]))
        logits.append(mixed(input_ids=rows, adapter_names=["a", "b", "__base__"]).logits)
        if len(logits) == 1:
            for row, name in enumerate("ab"):
                mixed.set_adapter(name)
                alone = mixed(input_ids=rows[row : row + 1]).logits
                torch.testing.assert_close(logits[0][row : row + 1], alone, **CLOSE)
    torch.testing.assert_close(logits[1], logits[0], **CLOSE)


# Rows that alternate in their tensor, other mixers, experts, and linears that no tensor of transformers' shares.
OTHER_LAYERS: dict[str, Any] = {
    "qwen3_next": ALL,
    "hybrid-0": "linear",
    "deepseek_v3-groups": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "laguna-experts": ["q_proj", "g_proj", "o_proj"],
}


@pytest.mark.parametrize(
    ("case", "method"),
    every(6, OTHER_LAYERS, ["OFT", "IA3", "HIRA", "VBLORA", "MISS", "DELORA"]),
)
def test_methods_on_other_layers(case: str, method: str, tmp_path: Path) -> None:
    targets = OTHER_LAYERS[case]
    judge = make_theirs(case, tmp_path).float()
    if targets == "linear":
        linears = (n for n, m in judge.named_modules() if isinstance(m, torch.nn.Linear))
        targets = sorted({name.rpartition(".")[2] for name in linears} - {"lm_head"})
    kind, fields = METHODS[method]
    fields = fields | dict(target_modules=targets)
    if method == "IA3":
        fields["feedforward_modules"] = targets[::2]
    if method == "OFT":
        fields["oft_block_size"] = 2
        fields["target_modules"] = [n for n in targets if n != "kv_b_proj"]  # an error in peft
    config = make_config((kind, fields))
    if method == "VBLORA":
        config.vector_length = 1
    first, second = adapted(judge, config), adapted(ours(tmp_path), config)
    shake(first)
    shake(second)
    assert_equal(first, second, config)
    assert_merged_alike(first, second, config)


@pytest.mark.parametrize(
    ("method", "recipe"),
    every(3, ["OFT", "LORA", "POLY"], ["current", "delayed", "blockwise", "mxfp8"]),
)
def test_methods_under_a_recipe(method: str, recipe: str, base: Path) -> None:
    """The rows of a changed input run in FP8 too; 22 tokens are no multiple of any recipe's rows."""
    config = make_config(METHODS[method])
    edges = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    exact = adapted(ours(base), config)
    shake(exact)
    expected = exact(input_ids=IDS, **options(config)).logits
    model = ours(base, recipe=recipe, dtype="bfloat16", engine="emulated", **edges)
    tuned = adapted(model.train(), config).train()
    shake(tuned)
    output = tuned(input_ids=IDS, labels=IDS, **options(config))
    output.loss.backward()
    error = (output.logits.float() - expected).norm() / expected.norm()
    assert error < 0.25  # of E4M3's three bits, over two layers with weights of 0.2
    for name, parameter in trainable(tuned).items():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name


def test_a_merge_in_place_is_written_into_alternating_rows(tmp_path: Path) -> None:
    """Values of rows are a copy there, and of FP8 weights everywhere."""
    make_theirs("qwen3_next", tmp_path)
    model = ours(tmp_path)
    rows = model.model.layers[0].self_attn.get_submodule("q_proj")
    before = rows.weight.data.clone()
    rows.weight.data.mul_(2)
    rows.weight.data[1].zero_()
    rows.weight.data.reshape(-1)[:3].add_(1)
    expected = before * 2
    expected[1] = 0
    expected.view(-1)[:3] += 1
    assert torch.equal(torch.Tensor(rows.weight.data), expected)
    read = TEModelsForCausalLM.wrap(copy.deepcopy(model.model))
    again = read.model.layers[0].self_attn.get_submodule("q_proj").weight.data
    assert torch.equal(again.as_subclass(torch.Tensor), expected)


def test_the_linears_have_the_order_of_transformers(base: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for case in ("llama3", "hybrid-0", "deepseek_v3-groups", "gemma2-odd"):
            judge = make_theirs(case, Path(folder) / case)
            named = [n for n, m in judge.named_modules() if isinstance(m, torch.nn.Linear)]
            model = CausalLM.from_pretrained(Path(folder) / case, device="cpu")
            found = TEModelsForCausalLM.wrap(model)
            own = {name for name, m in found.named_modules() if isinstance(m, torch.nn.Linear)}
            ordered = [name for name, _ in found.named_modules() if name in own & set(named)]
            assert ordered == [name for name in named if name in own]
