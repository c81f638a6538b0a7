"""The check that a run fits into memory, before data or weights are read."""

import functools
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from te_models.causal_lm import CausalLM
from te_models.config.base_weights import STORED
from te_models.config.recipe import FP8_WEIGHTS
from te_models.config.training import TrainConfig
from te_models.device.choice import choose_device
from te_models.distributed.environment import number
from te_models.errors import UsageError, plural
from te_models.files.formats import Fields
from te_models.fp8.primary_weights import SHARDED_SCHEMES, quantize_weights_alike
from te_models.optim import resolve_options
from te_models.planning.memory_plan import MemoryPlan, plan_memory
from te_models.planning.smallest_change import Change, smallest_change
from te_models.planning.stored_base import StoredBase
from te_models.saving.pretrained import stored_storages
from te_models.training.parallel import Parallel
from te_models.training.run_model import ModelSource
from te_models.training.settings import RunSettings, names_experts

OFFLOADS = ("optimizer_offload", "activation_offload")
GPUS = (2, 4, 8)  # numbers of GPUs to suggest if no option makes the run fit
CGROUP = Path("/sys/fs/cgroup")
GIB = 2**30


@dataclass(frozen=True)
class MemoryCheck:
    """Predicted and available memory of a run, in bytes per device."""

    plan: MemoryPlan
    needed: int
    available: int
    device: torch.device

    def __str__(self) -> str:
        about = "" if self.device.type == "cuda" else "about "  # the plan describes a GPU's kernels
        largest = sorted(self.plan.peak.parts().items(), key=lambda part: -part[1])[:3]
        parts = []
        for name, size in largest:
            if size:
                parts.append(f"{name.replace('_', ' ').replace('fp8', 'FP8')} {_gib(size)}")
        free = f"{_gib(self.available)} free on {self.device}"
        return f"{about}{_gib(self.needed)} at the peak ({', '.join(parts)}), {free}"


def check_memory(model: ModelSource, config: TrainConfig, processes: Parallel) -> MemoryCheck:
    """Return the memory that a run needs and the memory available.

    The kind of parallelism in `config` is resolved, not "auto".

    Raises:
        UsageError: the run does not fit, and `config.memory_check` is on; the line has the smallest change that helps.
    """
    settings = model.settings
    shape = model.shape
    if config.seq_len > shape.longest_sequence:
        # Packed documents are shorter than a window. Whether there are any is known once the data is open.
        shape = replace(shape, max_position_embeddings=config.seq_len)
    recipe = model.recipe
    device = torch.device(processes.device or choose_device(settings.build.get("device")))
    options = {**_build_options(model), **_step_options(settings, config, processes)}
    if device.type != "cuda":  # offloaded tensors stay in the same memory
        options |= dict.fromkeys(OFFLOADS, False)

    later_recipes = [recipe.followed_by(name) for _, name in config.recipe_changes]
    if options.get("fp8_params") and recipe.quantized:
        for later in later_recipes:
            if not quantize_weights_alike(recipe, later):
                raise UsageError(
                    f"recipe_schedule={config.recipe_schedule!r}: FP8 weights have the format of one recipe: leave out "
                    "recipe_schedule, or fp8_params"
                )
    if later_recipes:
        # The run must fit under each recipe of its schedule: plan for the one that needs most.
        recipes = [recipe, *later_recipes]
        recipe = max(recipes, key=lambda one: plan_memory(shape, one, **options).peak.total)
    host = available_memory(torch.device("cpu")) // max(1, number("LOCAL_WORLD_SIZE", 1))

    def plan(**changes: Any) -> MemoryPlan:
        """Return the plan of the run, or of the run with changed options: where it does not fit, others are tried."""
        changed = plan_memory(shape, recipe, **{**options, **changes})
        if changes and changed.host > host:
            raise UsageError("more than the host's memory")
        return replace(changed, training=replace(changed.training, cuda=device.type == "cuda"))

    own_plan = plan()
    check = MemoryCheck(own_plan, own_plan.peak.total, available_memory(device), device)
    problem = ""
    if own_plan.host > host:
        problem = _host_problem(options, needed=own_plan.host, free=host)
    elif check.needed > check.available and config.memory_check:
        refusal = _Refusal(
            check=check,
            plan=plan,
            options=options,
            settings=settings,
            config=config,
            processes=processes,
            resumed=model.checkpoint is not None,
        )
        problem = refusal.line()
    if problem and config.memory_check:
        raise UsageError(problem)
    return check


def available_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device; for a CPU, within the limits of this process's control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = sum(int(lines.get(name, "0").split()[0]) * 1024 for name in ("MemAvailable", "SwapFree"))
    free_in_group = _free_in_control_group()
    if free_in_group is not None:
        free = min(free, free_in_group)
    return max(0, free)


def _free_in_control_group() -> int | None:
    """Return the bytes that this process's control group allows it beyond those in use; None: there is no limit."""
    limit = CGROUP / "memory.max"
    stat = CGROUP / "memory.stat"
    if not limit.is_file() or not stat.is_file():
        return None
    most = limit.read_text().strip()
    if not most.isdecimal():  # "max"
        return None
    used = int((CGROUP / "memory.current").read_text())
    kinds = dict(line.split() for line in stat.read_text().splitlines())
    # Files that were read count as used, and are dropped when memory is asked for.
    cached = int(kinds.get("inactive_file", "0"))
    return int(most) - used + cached


def check_disk(folder: Path, size: int, kept_checkpoints: int) -> None:
    """Raise UsageError if a checkpoint of `size` bytes cannot fit where `folder` is or will be.

    Warn if `kept_checkpoints` of them do not fit.

    A run writes a checkpoint before it deletes an older one.
    """
    # The folder of a new run is not there yet: its nearest parent is on the same disk.
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    sizes = (
        f"a checkpoint takes {_on_disk(size)}, and {folder} has {_on_disk(free)} of disk space free"
    )
    if size > free:
        raise UsageError(f"{sizes}: make room, or give another folder")
    if size * (kept_checkpoints + 1) > free:
        warnings.warn(
            f"{sizes}, too little for {plural(kept_checkpoints + 1, 'checkpoint')}: make room, or lower keep_last",
            stacklevel=2,
        )


def _build_options(model: ModelSource) -> Fields:
    """Return the keywords of plan_memory that the model is built with."""
    options: Fields = dict(
        activation_checkpointing="none",
        activation_offload=False,
        fp8_params=False,
        dtype_bytes=model.dtype.itemsize,
    )
    # Left out where the run leaves it out: plan_memory's default is then the model's.
    for name in ("activation_checkpointing", "activation_offload", "fp8_params", "compile"):
        if model.options.get(name) is not None:
            options[name] = model.options[name]
    folder = model.settings.model
    if model.options.get("base_weights") == STORED and folder is not None:
        options["base_weights"] = StoredBase.in_folder(stored_storages(CausalLM, folder))
    return options


def _step_options(settings: RunSettings, config: TrainConfig, processes: Parallel) -> Fields:
    """Return the keywords of plan_memory that follow from the run's steps and how processes share them.

    Only FSDP2 shares weights: without it each process holds what one GPU would, and the plan is of one.
    """
    layers = 1 if processes.tp is None else processes.tp.size()
    lora = settings.lora
    return dict(
        batch_size=config.batch_size if processes.uses_fsdp else processes.rows(config.batch_size),
        gpus=(processes.parts if processes.uses_fsdp else 1) * layers,
        tensor_parallel_size=layers,
        sequence_parallel=config.sequence_parallel,
        expert_parallel_size=1 if processes.ep is None else processes.ep.size(),
        context_parallel_size=1 if processes.cp is None else processes.cp.size(),
        fp8_dispatch=config.fp8_dispatch,
        seq_len=config.seq_len,
        gradient_accumulation=config.gradient_accumulation,
        optimizer=config.optimizer,
        optimizer_options=resolve_options(config.optimizer, config.optimizer_options),
        optimizer_offload=config.optimizer_offload,
        lora_rank=0 if lora is None else lora.rank,
        lora_experts=lora is not None and any(map(names_experts, lora.targets)),
    )


def _host_problem(options: Fields, needed: int, free: int) -> str:
    """Return the line for a run whose offloaded tensors need more bytes than the host has free."""
    moved = " and ".join(f"--{name.replace('_', '-')}" for name in OFFLOADS if options[name])
    return (
        f"this run does not fit: {moved} needs {_gib(needed)} of the host's memory per process, "
        f"{_gib(free)} free: leave it out, or use a smaller batch or model (--no-memory-check tries it)"
    )


@dataclass(frozen=True)
class _Refusal:
    """The line about missing memory and the smallest change that helps."""

    check: MemoryCheck
    plan: Callable[..., MemoryPlan]
    options: Fields
    settings: RunSettings
    config: TrainConfig
    processes: Parallel
    resumed: bool

    def line(self) -> str:
        """Return the line."""
        line = f"this run does not fit: it needs {self.check}"
        anyway = "(--no-memory-check tries it)"
        fixed = self._fixed(self.processes.uses_fsdp)
        if self.processes.tp is not None or self.processes.ep is not None:
            # The parts of divided layers and experts have no optimizer but adamw, and none of the other options.
            fixed |= {"optimizer", "optimizer_offload", "fp8_params", "lora_rank"}
        copies = 1 if self.processes.uses_fsdp else self.processes.data_world
        change = self._change(self.plan, self.options, fixed, copies)
        if change is not None:
            return f"{line}: add {change}, which needs {_gib(change.peak)} {anyway}"
        advice = self._more_gpus()
        if advice is not None:
            return f"{line}: {advice} {anyway}"
        return f"{line}: no option of this run makes it fit; choose a smaller model, or more GPUs {anyway}"

    def _change(
        self, plan: Any, options: Fields, fixed: set[str], processes: int = 1
    ) -> Change | None:
        """Return the smallest change of a run with these options that makes it fit, but for those in `fixed`."""
        optimizer_options = self.config.optimizer_options
        if isinstance(optimizer_options, str):
            text = optimizer_options
        else:
            text = ",".join(f"{name}={value}" for name, value in optimizer_options.items())
        return smallest_change(
            plan,
            options,
            self.check.available,
            fixed=fixed,
            processes=processes,
            own_options=text,
        )

    def _fixed(self, fsdp: bool) -> set[str]:
        """Return the keywords of plan_memory that this run cannot change, under FSDP2 or without."""
        scheme = self.check.plan.recipe.scheme
        lora = self.settings.lora is not None
        fixed: set[str] = set()
        # What a checkpoint holds cannot change any more.
        if self.resumed:
            fixed |= {"batch_size", "seq_len", "optimizer", "fp8_params", "lora_rank"}
        if self.check.device.type != "cuda":
            fixed.update(OFFLOADS)
        if self.options.get("base_weights") is not None:
            fixed.add("fp8_params")
        if fsdp:
            fixed.add("optimizer_offload")
        if self.settings.command != "finetune":
            fixed.add("lora_rank")
        # DDP averages gradients of BF16 weights only, so whole copies on several GPUs have no FP8 weights.
        replicated = not fsdp and self.processes.ranks.world > 1 and not lora
        if scheme not in (SHARDED_SCHEMES if fsdp else FP8_WEIGHTS) or replicated:
            fixed.add("fp8_params")
        return fixed

    def _more_gpus(self) -> str | None:
        """Return how to start the run on several GPUs; None if it cannot be, or that does not help."""
        merges = self.settings.lora is not None and self.settings.lora.merge  # the whole model
        single = self.config.optimizer_offload or merges
        if single or self.processes.ranks.world > 1 or self.check.device.type != "cuda":
            return None
        own_batch = self.options["batch_size"]
        for gpus in GPUS:
            # The nearest batch that so many GPUs can share.
            batch = max(gpus, own_batch // gpus * gpus)
            if batch != own_batch and self.resumed:
                continue
            options = {**self.options, "gpus": gpus, "batch_size": batch}
            plan = functools.partial(self.plan, **options)
            start = f"start it on {gpus} such GPUs with torchrun --nproc-per-node {gpus} and --parallel fsdp"
            fixed = self._fixed(fsdp=True)
            if batch != own_batch:
                start += f" --batch-size {batch}"
                fixed.add("batch_size")
            try:
                if plan().peak.total <= self.check.available:
                    return start
                change = self._change(plan, options, fixed)
                if change is not None:
                    return f"{start}, and add {change}"
            except UsageError:  # such as FP8 weights that cannot be shared
                continue
        return None


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"


def _on_disk(size: int) -> str:
    """Return a size on the disk, of which a small model's is told apart from none."""
    return _gib(size) if size >= 10 * 2**20 else f"{size / 2**10:,.0f} KiB"
