"""`te-models bench`: time a training step under several recipes and beside other libraries."""

import click
from rich.text import Text

from te_models.cli.options import (
    Command,
    build_options,
    console,
    given_options,
    option,
    out_option,
    refuse_base_weights,
    setting_option,
)
from te_models.config.data import split_names
from te_models.config.model import config_fields
from te_models.config.presets import get_preset

SEQ_LEN = 2048  # default, unless the model's maximum is less


@click.command(cls=Command)
@setting_option("preset", required=True)
@build_options
@option(
    "--recipes",
    default="bf16,delayed,current",
    help="Recipes to time; what follows a + sets how one runs, as in delayed+no_edges+graph.",
)
@option(
    "--peers",
    default="none",
    help="Other implementations to time: torch, torchao, te-layer, te-layer-bf16.",
)
@option("--batch-size", default=8, help="Sequences per step.")
@option(
    "--seq-len",
    type=int,
    help=f"Tokens per sequence; default: {SEQ_LEN}, or the model's maximum if that is less.",
)
@option("--steps", default=15, help="Timed rounds; every variant runs once in each.")
@option("--warm-up", default=3, help="Steps of each variant that are not timed.")
@out_option("Folder for bench.json and bench.png.")
@setting_option("compile")
def bench(preset: str, recipes: str, peers: str, out: str | None, **options: object) -> None:
    """Time training under several recipes and in other libraries."""
    from te_models.device.choice import choose_device  # noqa: PLC0415  imports torch
    from te_models.inspect.bench import bench as run  # noqa: PLC0415
    from te_models.inspect.bench_report import bench_table, write_bench  # noqa: PLC0415

    given_by_user = given_options(options)
    refuse_base_weights(given_by_user)
    config = get_preset(
        preset,
        **{
            name: given_by_user.pop(name) for name in list(given_by_user) if name in config_fields()
        },
    )
    given_by_user.setdefault("seq_len", min(SEQ_LEN, config.longest_sequence))
    device = choose_device(given_by_user.pop("device", None))
    terminal = console(160)
    with terminal.status("") as status:
        result = run(
            config,
            [name for name in split_names(recipes) if name != "none"],
            [name for name in split_names(peers) if name != "none"],
            device=device,
            progress=lambda line: status.update(Text(line)),
            **given_by_user,
        )
    terminal.print(bench_table(result))
    if out is not None:
        terminal.print(f"plot: {write_bench(result, out, preset)}", soft_wrap=True)
