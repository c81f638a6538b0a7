"""The precision plan: which precision and engine each linear runs in, and why."""

from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from te_models.planning.printable import Printable

# The precision of linears that are not quantized, by the dtype of the model.
PRECISION_NAMES = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32"}
UNQUANTIZED = tuple(PRECISION_NAMES.values())


@dataclass(frozen=True)
class PlanRow:
    """One te.Linear: `gemm` is "in -> out" features.

    `precision` is the model's dtype ("BF16", "FP16" or "FP32"), or the FP8 formats, forward/backward.
    """

    layer: str
    module: str
    gemm: str
    precision: str
    engine: str
    reason: str


@dataclass(frozen=True)
class PrecisionPlan(Printable):
    """The precision of every linear of a model, in order of execution.

    Iterate over it for its `PlanRow`s; print it, or display it in a notebook, for a table.
    """

    title: str
    rows: tuple[PlanRow, ...]
    notes: tuple[str, ...] = ()  # operations that fused kernels do not support for this model

    def __iter__(self) -> Iterator[PlanRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def count(self, precision: str) -> int:
        """Return the number of linears that run in "BF16", "FP16" or "FP32", or in any lower precision ("FP8")."""
        if precision in UNQUANTIZED:
            return sum(row.precision == precision for row in self.rows)
        return sum(row.precision not in UNQUANTIZED for row in self.rows)

    def __rich__(self) -> Group:
        """Return a table per precision and reason: its linears, and the layers that have them so."""
        # (precision, reason) -> rows of (module, gemm, layers)
        tables: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
        # Widths over all tables, so that their columns stand below each other.
        module_width = 0
        gemm_width = 0
        for layers, module, gemm, precision, _, reason in self.folded():
            where = f"layers {layers}"
            if layers == "head":
                where = layers
            elif layers.isdecimal():
                where = f"layer {layers}"
            row = (f"  {module}", gemm, where)
            tables.setdefault((precision, reason), []).append(row)
            module_width = max(module_width, len(row[0]))
            gemm_width = max(gemm_width, len(gemm))
        parts: list[RenderableType] = [Text(self.title, "bold")]
        for (precision, reason), rows in tables.items():
            style = "" if precision in UNQUANTIZED else "green"
            table = Table(
                Column(min_width=module_width, no_wrap=True),
                Column(min_width=gemm_width, no_wrap=True),
                Column(),
                box=None,
                pad_edge=False,
                show_header=False,
                style=style,
            )
            for row in rows:
                table.add_row(*row)
            parts += [Text(f"{precision}: {reason}", style), table]
        return Group(*parts, *map(Text, self.notes))

    def to_dict(self) -> list[dict[str, str]]:
        """Return the rows as plain JSON values."""
        return [asdict(row) for row in self.rows]

    def folded(self) -> Iterator[tuple[str, ...]]:
        """Yield rows, as in `PlanRow`; those that differ only in their layer as one with ranges, such as "1-3, 5"."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for row in self.rows:
            layer, *rest = astuple(row)
            groups.setdefault(tuple(rest), []).append(layer)
        for rest, layers in groups.items():
            yield _ranges(layers), *rest


def _ranges(layers: list[str]) -> str:
    """Return numbers of layers in ascending order as ranges; a single name as it is."""
    ranges: list[list[str]] = []
    for layer in layers:
        if ranges and layer.isdecimal() and int(layer) == int(ranges[-1][-1]) + 1:
            ranges[-1].append(layer)
        else:
            ranges.append([layer])
    parts = []
    for first, *others in ranges:
        parts.append(f"{first}-{others[-1]}" if others else first)
    return ", ".join(parts)
