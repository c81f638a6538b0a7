"""The FP8 of a card beside the one that a run was trained with: recorded products and a loss, computed again.

The products are those that the run kept when it ended (te_models.training.card). They are compared bit for bit with
products of the same operands on the card at hand, and both with the emulated engine, which adds as the tensor cores of
Hopper or of Ada do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from te_models.causal_lm import CausalLM
from te_models.config.recipe import SCHEMES, Recipe
from te_models.device.choice import choose_device
from te_models.device.determinism import deterministic
from te_models.engine import engine_module, get_engine
from te_models.errors import UsageError
from te_models.inspect.replay_report import plain
from te_models.inspect.verify import sqnr_db
from te_models.planning.printable import Printable
from te_models.saving.pretrained import saved_folder
from te_models.saving.run_folder import step_name
from te_models.training.captures import device_name
from te_models.training.card import Card, compute, read_card
from te_models.training.evaluation import evaluate

CORES = ("hopper", "ada")  # as exact_gemm of the emulated engine names them
PER_TENSOR = ("DelayedScaling", "Float8CurrentScaling")
# Schemes whose products the emulated engine computes as a tensor core does.
EXACT = (*PER_TENSOR, "Float8BlockScaling")


@dataclass(frozen=True)
class ComparedProduct:
    """A recorded product, and the same one here.

    Attributes:
        linear: its te.Linear.
        gemm: "fprop", "dgrad" or "wgrad".
        recipe: the name of the te.Linear's recipe.
        differing: the share of elements that have other bits here; NaN if the recipe does not run here.
        largest: the largest difference, over the largest magnitude of the recorded result.
        sqnr: the recorded result over the difference, in dB; infinite if there is none.
        recorded_as, here_as: tensor cores ("hopper", "ada") whose arithmetic gives the same bits.
    """

    linear: str
    gemm: str
    recipe: str
    differing: float
    largest: float
    sqnr: float
    recorded_as: tuple[str, ...]
    here_as: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """True if every bit is the recorded one."""
        return self.differing == 0


@dataclass(frozen=True)
class Against(Printable):
    """A card beside the one that a run was trained on. Print it, or take `to_dict`.

    Attributes:
        run: the folder of the run.
        card: what it recorded.
        device, engine: of the card at hand.
        products: the recorded products, and those here.
        loss: of the run's last model on the recorded batch, here; None if it could not be computed.
        reason: why not.
        refused: recipe -> why it does not run here.
    """

    width: ClassVar[int] = 130
    run: str
    card: Card
    device: str
    engine: str
    products: tuple[ComparedProduct, ...]
    loss: float | None
    reason: str
    refused: dict[str, str]

    @property
    def same(self) -> bool:
        """True if every product has the recorded bits."""
        return all(one.equal for one in self.products)

    @property
    def verdict(self) -> str:
        """The result of the comparison, in a line."""
        then = f"{self.card.device} ({self.card.engine})"
        count = len(self.products)
        different = [one for one in self.products if not one.equal]
        if not different:
            line = (
                f"the FP8 of this card equals {then}: all {count} recorded products have equal bits"
            )
        elif self.refused:
            line = "; ".join(
                f"{name} does not run here: {why}" for name, why in self.refused.items()
            )
        else:
            worst = min(different, key=lambda one: one.sqnr)
            line = (
                f"the FP8 of this card differs from {then}: {len(different)} of {count} products differ, most "
                f"{worst.gemm} of {worst.linear}, in {worst.differing:.1%} of its elements by up to "
                f"{worst.largest:.2g} of the largest ({worst.sqnr:.0f} dB)"
            )
            line += self._arithmetic(different)
        return f"{line}; {self._loss()}"

    def _arithmetic(self, different: list[ComparedProduct]) -> str:
        """Name the tensor cores that explain a difference, if any do."""
        then = common(one.recorded_as for one in different)
        now = common(one.here_as for one in different)
        # Both are explained, by different cores: the cards add in different ways.
        if then and now and not set(then) & set(now):
            return f"; the recorded ones add as {named(then)} does, those here as {named(now)}"
        if then:
            return f"; the recorded ones add as {named(then)} does, those here as no card that is emulated"
        if now:
            return f"; those here add as {named(now)} does, the recorded ones as no card that is emulated"
        return ""

    def _loss(self) -> str:
        if self.loss is None:
            return f"the loss was not compared: {self.reason}"
        then = self.card.loss
        if math.isnan(then):
            return f"the recorded loss is not finite; here it is {self.loss:.6g}"
        if self.loss == then:
            return f"the loss is the recorded one, {then:.6g}"
        return f"the loss is {self.loss:.6g} here, {then:.6g} as recorded ({self.loss - then:+.2g})"

    def __rich__(self) -> Group:
        """Return the table of products and the verdict."""
        title = f"recorded on {self.card.device} ({self.card.engine}), here {self.device} ({self.engine})"
        table = Table(title=title, title_justify="left", box=None)
        for column in ("linear", "product", "recipe"):
            table.add_column(column, overflow="fold")
        for column in ("differ", "by up to", "SQNR", "recorded as", "here as"):
            table.add_column(column, justify="right")
        for one in self.products:
            unknown = math.isnan(one.differing)
            figures = ["", "", ""]
            if not unknown and one.equal:
                figures = ["none", "", ""]
            elif not unknown:
                figures = [f"{one.differing:.1%}", f"{one.largest:.2g}", f"{one.sqnr:.1f} dB"]
            table.add_row(
                one.linear,
                one.gemm,
                one.recipe,
                *figures,
                named(one.recorded_as),
                named(one.here_as),
            )
        return Group(table, Text(self.verdict))

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain JSON values; numbers that JSON lacks are None."""
        recorded = {
            "device": self.card.device,
            "engine": self.card.engine,
            "capability": self.card.capability,
            "versions": self.card.versions,
            "step": self.card.step,
            "loss": self.card.loss,
        }
        return plain(
            {
                "run": self.run,
                "recorded": recorded,
                "device": self.device,
                "engine": self.engine,
                "products": [{**vars(one), "equal": one.equal} for one in self.products],
                "loss": self.loss,
                "loss_reason": self.reason,
                "refused": self.refused,
                "ok": self.same,
                "verdict": self.verdict,
            }
        )


def verify_against(
    run: str | Path, device: str | torch.device | None = None, engine: str | None = "auto"
) -> Against:
    """Compute the recorded products and loss of a run on the card at hand.

    Args:
        run: the folder of a run that recorded its card (`--record`).
        device: of the card; None: the first GPU, else the CPU.
        engine: "auto", "native" or "emulated".

    Raises:
        DataError: the run has recorded no card.
    """
    card = read_card(run)
    place = None if device is None else choose_device(device)
    te, name, _ = get_engine(engine, place)
    if place is None:
        place = torch.device("cuda" if torch.cuda.is_available() and name == "native" else "cpu")
    products: list[ComparedProduct] = []
    refused: dict[str, str] = {}
    for sample in card.linears:
        here: dict[str, Tensor] = {}
        possible, why = available(te, sample.recipe)
        if possible:
            operands = {part: value.to(place) for part, value in sample.operands.items()}
            here = {
                gemm: value.cpu() for gemm, value in compute(te, operands, sample.recipe).items()
            }
        else:
            refused[sample.recipe.name] = why
        emulated = as_tensor_cores(sample.operands, sample.recipe)
        for gemm, recorded in sample.results.items():
            cores = {core: results[gemm] for core, results in emulated.items()}
            products.append(
                compared(
                    sample.name,
                    gemm,
                    recipe=sample.recipe.name,
                    recorded=recorded,
                    here=here.get(gemm),
                    cores=cores,
                )
            )
    loss, reason = loss_here(run, card, place, name) if not refused else (None, "see above")
    return Against(
        run=str(run),
        card=card,
        device=device_name(place),
        engine=name,
        products=tuple(products),
        loss=loss,
        reason=reason,
        refused=refused,
    )


def available(te: ModuleType, recipe: Recipe) -> tuple[bool, str]:
    """Return whether an engine runs a recipe on this machine, and if not, why."""
    possible, why = getattr(te, SCHEMES[recipe.scheme].available)(return_reason=True)
    return bool(possible), str(why)


def as_tensor_cores(operands: dict[str, Tensor], recipe: Recipe) -> dict[str, dict[str, Tensor]]:
    """Return the results of a sample as each emulated tensor core computes them, by its name."""
    emulated = engine_module("emulated")
    results = {}
    for core in CORES:
        if recipe.scheme in (EXACT if core == "hopper" else PER_TENSOR):
            with emulated.exact_gemm(gpu=core):
                results[core] = compute(emulated, operands, recipe)
    return results


def compared(
    linear: str,
    gemm: str,
    recipe: str,
    recorded: Tensor,
    here: Tensor | None,
    cores: dict[str, Tensor],
) -> ComparedProduct:
    """Compare a recorded result with the one here (None: there is none), and both with tensor cores."""
    recorded_as = _equal_to(recorded, cores)
    if here is None:
        return ComparedProduct(
            linear=linear,
            gemm=gemm,
            recipe=recipe,
            differing=math.nan,
            largest=math.nan,
            sqnr=-math.inf,
            recorded_as=recorded_as,
            here_as=(),
        )
    size = recorded.double().abs().max().item()
    change = (recorded.double() - here.double()).abs().max().item()
    return ComparedProduct(
        linear=linear,
        gemm=gemm,
        recipe=recipe,
        differing=(recorded != here).double().mean().item(),
        largest=change / size if size else change,
        sqnr=sqnr_db(recorded, here),
        recorded_as=recorded_as,
        here_as=_equal_to(here, cores),
    )


def _equal_to(result: Tensor, cores: dict[str, Tensor]) -> tuple[str, ...]:
    """Return the tensor cores whose emulated result this is, bit for bit."""
    return tuple(core for core, emulated in cores.items() if torch.equal(emulated, result))


def loss_here(
    run: str | Path, card: Card, device: torch.device, engine: str
) -> tuple[float | None, str]:
    """Return the loss of the run's last model on the recorded batch, or None and the reason."""
    folder = saved_folder(run)
    if folder.name != step_name(card.step):
        return None, f"its newest checkpoint is not of step {card.step}"
    place: dict[str, Any] = {"engine": engine, "device": device}
    try:
        model = CausalLM.from_pretrained(folder, **place)
    except UsageError as error:
        return None, str(error)
    with deterministic(card.deterministic):
        return evaluate(model, [card.batch]), ""


def common(names: Iterator[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the tensor cores that are among all of several sets."""
    first, *rest = [set(one) for one in names]
    for one in rest:
        first &= one
    # In one order, whatever the order in a set.
    return tuple(core for core in CORES if core in first)


def named(cores: tuple[str, ...]) -> str:
    """Return tensor cores as people call them."""
    return " or ".join(core.capitalize() for core in cores)
