"""The hub: what is downloaded, and transformers' keywords in our words."""

import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from te_models import CausalLM
from te_models.errors import UsageError
from te_models.interop.hub import REFUSED, WITHOUT_EFFECT, local_folder, split_options
from te_models.interop.model_card import MARK
from te_models.model.options import LoadOptions

hub = pytest.importorskip("huggingface_hub")

REPOSITORY = [
    "config.json", "generation_config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
    "tokenizer.json", "tekken.json", "vocab.txt", "qwen.tiktoken", "spiece.model", "chat_template.jinja",
    "additional_chat_templates/rag.jinja", "consolidated.safetensors", "consolidated-00001-of-00002.safetensors",
    "original/consolidated.00.pth", "original/params.json", "original/tokenizer.model", "onnx/model.onnx", "README.md",
    "pytorch_model.bin",
]  # fmt: skip
UNWANTED = 8  # the last ones


def test_only_what_a_model_needs_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        hub, "snapshot_download", lambda name, **options: asked.update(options) or str(tmp_path)
    )
    wanted: dict[str, Any] = dict(
        revision="v2", token="secret", cache_dir="here", local_files_only=True
    )
    assert local_folder("owner/model", **wanted) == tmp_path
    patterns = {name: asked.pop(name) for name in ("allow_patterns", "ignore_patterns")}
    assert asked == wanted
    assert list(hub.utils.filter_repo_objects(REPOSITORY, **patterns)) == REPOSITORY[:-UNWANTED]


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (dict(torch_dtype="bfloat16"), dict(dtype=torch.bfloat16)),
        (dict(dtype="torch.float32"), dict(dtype=torch.float32)),
        (dict(dtype=torch.float16), dict(dtype=torch.float16)),
        (dict(dtype="auto"), {}),
        (dict(device_map="cpu"), dict(device=torch.device("cpu"))),
        (dict(device_map={"": "cuda:1"}), dict(device=torch.device("cuda:1"))),
        (dict(device_map={"": 0}), dict(device="cuda:0")),
        (dict(device_map=1), dict(device="cuda:1")),
        (dict(device_map="auto"), dict(device=None)),
        (
            dict(
                attn_implementation="sdpa",
                trust_remote_code=True,
                low_cpu_mem_usage=True,
                use_safetensors=True,
            ),
            {},
        ),
        (dict(use_cache=False, code_revision="main", tp_size=None, mirror=""), {}),
        (
            dict(quantization_config=None, load_in_8bit=False, recipe="current"),
            dict(recipe="current"),
        ),
    ],
)
def test_keywords_of_transformers_are_taken(given: dict, ours: dict) -> None:
    assert split_options(given) == ({}, ours)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(attn_implementation="flash_attention_2"), "scaled_dot_product_attention"),
        (dict(device_map="balanced"), "tp_mesh="),
        (dict(device_map={"a": 0, "b": 1}), "device_map names 2 devices"),
        (dict(device_map="nowhere"), "no device"),
        (dict(device_map="cpu", device="cpu"), "either device= or device_map="),
        (dict(load_in_4bit=True), "load_in_4bit=True is not supported: .* recipe='current'"),
        (dict(variant="fp16"), "revision="),
        (dict(tp_size=2), "tp_mesh="),
        (dict(offload_buffers=True), "device="),
        (dict(use_kernels=True), "fused="),
        (dict(key_mapping={"a": "b"}), "rename them"),
        (dict(from_flax=True), "save the model with transformers"),
        (dict(use_auth_token="secret"), "give token="),
        (dict(quantization_config={"load_in_8bit": True}), "own recipes"),
        (dict(torch_dtype="float64"), "dtype='float64' is not supported"),
        (
            dict(revisoin="main"),
            "unknown keyword 'revisoin': did you mean 'revision'[?] [a-z_.]*LoadOptions lists all",
        ),
    ],
)
def test_unsupported_keywords_are_refused_with_our_name_for_them(
    given: dict, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        CausalLM.from_pretrained(tmp_path, **given)
    assert "\n" not in str(caught.value) and "field of recipe" not in str(caught.value)


def test_every_keyword_of_transformers_is_known() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.14")
    source = inspect.getsource(transformers.PreTrainedModel.from_pretrained)
    theirs = {
        name
        for name in re.findall(r'kwargs\.pop\(\s*"(\w+)"', source)
        if not name.startswith("_from")
    }
    assert len(theirs) > 20
    assert theirs - REFUSED.keys() - WITHOUT_EFFECT <= get_type_hints(LoadOptions).keys()


def test_a_folder_is_loaded_with_keywords_of_transformers(tmp_path: Path) -> None:
    model = CausalLM.from_preset("gated-nano", device="cpu")
    model.save_pretrained(tmp_path / "model", max_shard_size="300KB")
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 1
    options: Any = dict(
        torch_dtype="float32", device_map="cpu", revision="main", token=None, local_files_only=True
    )
    again = CausalLM.from_pretrained(tmp_path / "model", **options)
    assert again.dtype == torch.float32 and again.device.type == "cpu"


@pytest.mark.parametrize("size", [0, "5 GX", "GB", 1.5])
def test_a_size_that_is_none_is_refused(size: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max_shard_size"):
        CausalLM.from_preset("gated-nano", device="cpu").save_pretrained(
            tmp_path / "model", max_shard_size=size
        )


FILES = (
    "tekken.json", "qwen.tiktoken", "spiece.model", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.json", "chat_template.jinja",
    "additional_chat_templates/rag.jinja", "generation_config.json",
)  # fmt: skip


@pytest.mark.parametrize("formats", [("hf", "hf"), ("te", "te"), ("hf", "te"), ("te", "hf")])
def test_files_of_the_tokenizer_come_along(formats: tuple[Any, Any], tmp_path: Path) -> None:
    """Under any of the names that releases have, byte for byte, from folder to folder and over one of before."""
    plain = CausalLM.from_preset("gated-nano", device="cpu", attention_gate="none")
    plain.save_pretrained(tmp_path / "hub", format="hf")
    contents = {name: f'{{"content of": "{name}"}}'.encode() for name in FILES} | {
        "tokenizer.model": b"\0" * 5 * 2**20
    }
    for name, content in contents.items():
        (tmp_path / "hub" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "hub" / name).write_bytes(content)
    found = tmp_path / "hub"
    for format in formats:
        model = CausalLM.from_pretrained(found, device="cpu")
        found = tmp_path / f"{found.name}-{format}"
        for _ in range(2):
            model.save_pretrained(found, format=format)
        assert json.loads((found / "generation_config.json").read_text()) == {
            "content of": "generation_config.json"
        }
        for name in set(FILES) - {"generation_config.json"}:
            assert (found / name).read_bytes() == contents[name], name


def test_a_template_of_the_user_is_not_deleted(tmp_path: Path) -> None:
    plain = CausalLM.from_preset("gated-nano", device="cpu", attention_gate="none")
    plain.save_pretrained(tmp_path / "first", format="hf")
    (tmp_path / "first/additional_chat_templates").mkdir()
    (tmp_path / "first/additional_chat_templates/rag.jinja").write_text("rag")
    model = CausalLM.from_pretrained(tmp_path / "first", device="cpu")
    model.save_pretrained(tmp_path / "own")
    (tmp_path / "own/additional_chat_templates/mine.jinja").write_text("mine")
    with pytest.raises(UsageError, match="additional_chat_templates/mine.jinja"):
        model.save_pretrained(tmp_path / "own")


def card_of(folder: Path) -> Any:
    return hub.ModelCard.load(folder / "README.md")


@pytest.mark.filterwarnings("ignore:.*needs its own code in transformers")
def test_the_model_card_names_recipe_engine_and_figures(tmp_path: Path) -> None:
    model = CausalLM.from_preset("gated-nano", device="cpu", recipe="delayed", amax_history_len=7)
    model.save_pretrained(tmp_path / "gated", format="hf")
    card = card_of(tmp_path / "gated")
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["te-models", "transformer-engine", "delayed", "custom_code"]
    count = f"{model.config.num_parameters:,} parameters in bfloat16"
    for words in (count, "recipe `delayed`", "engine `emulated`", "amax_history_len=7", "16 of 25 below BF16",
                  "trust_remote_code=True", "not quantized"):  # fmt: skip
        assert words in card.content, words
    model.export(tmp_path / "served", format="fp8-channel")
    assert "| stored weights | float-quantized |" in card_of(tmp_path / "served").content


def test_the_card_of_a_run_has_its_losses_and_that_of_the_hub_its_base(tmp_path: Path) -> None:
    source = tmp_path / "models--Owner--a--b/snapshots/0123"
    plain = CausalLM.from_preset("gated-nano", device="cpu", attention_gate="none")
    plain.save_pretrained(source, format="hf")
    model = CausalLM.from_pretrained(source, device="cpu")
    result = {"step": 1200, "first_eval_loss": 4.5, "eval_loss": 3.25, "loss": {"$float": "nan"}}
    (source / "training.json").write_text(json.dumps({"result": result}))
    model.save_pretrained(tmp_path / "out", format="hf")
    card = card_of(tmp_path / "out")
    assert card.data.base_model == "Owner/a--b" and "custom_code" not in card.data.tags
    assert (
        "| steps | 1200 |" in card.content
        and "| eval loss after | 3.2500 nats per token |" in card.content
    )
    assert "training loss" not in card.content and "trust_remote_code" not in card.content


def test_a_card_of_the_user_stays(tmp_path: Path) -> None:
    model = CausalLM.from_preset("gated-nano", device="cpu", attention_gate="none")
    model.save_pretrained(tmp_path / "out", format="hf")
    model.set_recipe("current")
    model.save_pretrained(tmp_path / "out", format="hf")
    assert "recipe `current`" in card_of(tmp_path / "out").content  # ours is replaced
    for text in ("# Mine", card_of(tmp_path / "out").content.replace(MARK, "")):
        (tmp_path / "out/README.md").write_text(text)
        model.set_recipe("delayed")
        model.save_pretrained(tmp_path / "out", format="hf")
        assert (tmp_path / "out/README.md").read_text() == text


class StubApi:
    """huggingface_hub.HfApi, with a repository that is a folder."""

    root: Path
    calls: list[tuple[str, dict[str, Any]]]

    def __init__(self, token: Any = None) -> None:
        self.calls.append(("token", {"token": token}))

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        self.calls.append(("create_repo", options))
        return hub.RepoUrl(
            f"https://huggingface.co/{repo_id if '/' in repo_id else f'me/{repo_id}'}"
        )

    def create_branch(self, repo_id: str, **options: Any) -> None:
        self.calls.append(("create_branch", options))

    def file_exists(self, repo_id: str, filename: str, **options: Any) -> bool:
        return (self.root / repo_id / filename).is_file()

    def hf_hub_download(self, repo_id: str, filename: str, **options: Any) -> str:
        return str(self.root / repo_id / filename)

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, ignore_patterns: Any, **options: Any
    ) -> str:
        self.calls.append(("upload_folder", options))
        shutil.copytree(
            folder_path,
            self.root / repo_id,
            ignore=shutil.ignore_patterns(*ignore_patterns),
            dirs_exist_ok=True,
        )
        return f"https://huggingface.co/{repo_id}/commit/0"


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[StubApi]:
    StubApi.root, StubApi.calls = tmp_path / "remote", []
    monkeypatch.setattr(hub, "HfApi", StubApi)
    return StubApi


def test_a_model_is_pushed_to_the_hub(api: type[StubApi]) -> None:
    model = CausalLM.from_preset("gated-nano", device="cpu", attention_gate="none")
    address = model.push_to_hub(
        "model", private=True, token="secret", revision="v2", max_shard_size="300KB"
    )
    assert address == "https://huggingface.co/me/model/commit/0"
    assert ("token", {"token": "secret"}) in api.calls
    assert ("create_repo", {"private": True, "exist_ok": True}) in api.calls
    assert ("create_branch", {"branch": "v2", "exist_ok": True}) in api.calls
    upload = dict(api.calls)["upload_folder"]
    assert upload["revision"] == "v2" and upload["commit_message"]
    there = api.root / "me/model"
    assert len(list(there.glob("model-*.safetensors"))) > 1
    assert 'from_pretrained("model")' in card_of(there).content
    again = CausalLM.from_pretrained(there, device="cpu")
    assert torch.equal(again.embed_tokens.weight, model.embed_tokens.weight)


def test_a_card_of_the_user_on_the_hub_stays(api: type[StubApi]) -> None:
    model = CausalLM.from_preset("gated-nano", device="cpu", attention_gate="none")
    model.push_to_hub("me/model")
    model.set_recipe("current")
    model.push_to_hub("me/model")
    assert "recipe `current`" in card_of(api.root / "me/model").content
    (api.root / "me/model/README.md").write_text("# Mine")
    model.push_to_hub("me/model", create_pr=True, commit_message="again")
    assert (api.root / "me/model/README.md").read_text() == "# Mine"
    assert api.calls[-1] == (
        "upload_folder",
        {"commit_message": "again", "revision": None, "create_pr": True},
    )


@pytest.mark.filterwarnings("ignore")  # of a guide's reader, not of the tests
def test_the_programs_of_the_guide_run(
    api: type[StubApi], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    guide = (Path(__file__).parents[2] / "docs/guide/huggingface.md").read_text()
    monkeypatch.chdir(tmp_path)
    sizes = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        head_dim=16,
    )
    common: Any = dict(device="cpu", num_key_value_heads=1, **sizes)
    CausalLM.from_preset("qwen3-0.6b", vocab_size=9728, **common).save_pretrained(
        "path/to/Qwen3-0.6B", format="hf"
    )
    CausalLM.from_preset("llama-3.2-1b", vocab_size=96, **common).save_pretrained(
        "path/to/Llama-3.2-1B", format="hf"
    )
    CausalLM.from_preset("gated-nano", bos_token_id=256, **common).save_pretrained(
        "path/to/saved", format="hf"
    )
    CausalLM.from_preset("gated-nano", **common).save_pretrained("runs/mine")
    for code in re.findall(r"^```python\n(.*?)^```", guide, re.MULTILINE | re.DOTALL):
        exec(
            compile(code, "huggingface.md", "exec"), {"__name__": "__main__", "CausalLM": CausalLM}
        )
    assert (tmp_path / "back/config.json").is_file() and (
        tmp_path / "remote/me/my-model/README.md"
    ).is_file()


def test_what_the_hub_refuses_is_one_line(
    api: type[StubApi], monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = CausalLM.from_preset("gated-nano", device="cpu", attention_gate="none")
    with pytest.raises(UsageError, match="unknown keyword 'privat': did you mean 'private'"):
        model.push_to_hub("me/model", privat=True)

    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError("401 Unauthorized\nmore")

    monkeypatch.setattr(api, "create_repo", refuse)
    with pytest.raises(
        UsageError, match=r"did not take me/model \(RuntimeError: 401 Unauthorized\)$"
    ):
        model.push_to_hub("me/model")
