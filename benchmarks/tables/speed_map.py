"""The map of where FP8 pays: speed relative to BF16 over width and tokens of a micro-batch."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tables.text import RESULTS, load, markdown, measured_on, prose, table
from te_models.training.plots import new_figure, save_figure

RECIPES = ("delayed", "current", "blockwise")
# A point of a map: width, width of experts (0: none), tokens of a micro-batch.
Point = tuple[int, int, int]


def maps() -> list[str]:
    """Return the names of the maps that were measured."""
    return sorted(path.stem for path in RESULTS.glob("speed_map_*.json"))


def ratios(name: str, recipe: str) -> dict[Point, float]:
    """Return the speed of a recipe to BF16 at each point of a map."""
    times: dict[str, dict[Point, float]] = {}
    for row in load(name)["rows"]:
        point = (row["width"], row["experts"], row["batch"] * row["seq"])
        times.setdefault(row["recipe"], {})[point] = row["ms"]
    return {
        point: times["bf16"][point] / ms
        for point, ms in times[recipe].items()
        if point in times["bf16"]
    }


def _label(width: int, experts: int) -> str:
    return f"{width:,}, experts of {experts:,}" if experts else f"{width:,}"


@table
def speed_map() -> str:
    """Speed of each recipe to BF16 at all points."""
    parts = []
    for name in maps():
        found = {recipe: ratios(name, recipe) for recipe in RECIPES}
        shapes = list(dict.fromkeys(point[:2] for point in found["delayed"]))
        tokens = sorted({point[2] for point in found["delayed"]})
        lines = []
        for shape in shapes:
            cells = []
            for count in tokens:
                values = [found[recipe].get((*shape, count)) for recipe in RECIPES]
                cells.append(
                    ", ".join("-" if value is None else f"{value:.2f}" for value in values)
                )
            lines.append([_label(*shape), *cells])
        header = "width | " + " | ".join(f"{count:,} tokens" for count in tokens)
        parts.append(f"{measured_on(load(name))}\n\n{markdown(header, lines)}")
    return "\n\n".join(parts)


@table
def speed_map_result() -> str:
    """From how many tokens on each recipe is faster than BF16, by width."""
    lines = []
    for name in maps():
        gpu = load(name)["environment"]["gpu"].removeprefix("NVIDIA ").split()[0]
        for recipe in RECIPES:
            found = ratios(name, recipe)
            starts: dict[tuple[int, int], int] = {}
            most: dict[tuple[int, int], int] = {}
            for width, experts, tokens in sorted(found):
                most[width, experts] = tokens
                if found[width, experts, tokens] > 1.01:
                    starts.setdefault((width, experts), tokens)
            words = []
            for shape in dict.fromkeys(point[:2] for point in found):
                start = starts.get(shape)
                words.append(
                    f"{_label(*shape)}: "
                    + (f"never up to {most[shape]:,}" if start is None else f"{start:,}")
                )
            lines.append(
                prose(f"- `{recipe}` on an {gpu} pays from so many tokens: {'; '.join(words)}.")
            )
    return "\n".join(line.replace("\n", "\n  ") for line in lines)


def draw_speed_map(name: str, path: Path) -> None:
    """Draw a panel per recipe of a map: speed relative to BF16 as colors over width and tokens."""
    figure = new_figure((12, 5))
    image = None
    for axes, recipe in zip(figure.subplots(1, len(RECIPES), sharey=True), RECIPES, strict=True):
        found = ratios(name, recipe)
        shapes = list(dict.fromkeys(point[:2] for point in found))
        tokens = sorted({point[2] for point in found})
        grid = [[found.get((*shape, count), float("nan")) for count in tokens] for shape in shapes]
        image = axes.imshow(grid, cmap="RdYlGn", vmin=0.5, vmax=1.5, aspect="auto")
        for row, values in enumerate(grid):
            for column, value in enumerate(values):
                if value == value:
                    axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8)
        axes.set_xticks(range(len(tokens)), [f"{count:,}" for count in tokens])
        axes.set_yticks(range(len(shapes)), [_label(*shape) for shape in shapes], fontsize=8)
        axes.set(title=recipe, xlabel="tokens of a micro-batch")
    figure.axes[0].set_ylabel("width")
    assert image is not None
    figure.suptitle(load(name)["environment"]["gpu"])
    figure.colorbar(image, ax=figure.axes, label="speed relative to BF16")
    save_figure(figure, path)
