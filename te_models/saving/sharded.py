"""Checkpoints that many processes write at once, and that any number of processes can read.

The folder is the one that a single process writes (te_models.saving.folder): whole tensors in safetensors files with an
index, JSON, a manifest. So nothing in it depends on the number of processes, nothing has to be consolidated afterwards,
and from_pretrained, generate and convert read it as it is. The files are divided among the processes by size; each
tensor is gathered, one at a time, and written by the process of its file. All processes must see the same file system.

PyTorch's own torch.distributed.checkpoint is not used: its planner's metadata is a pickle, and its safetensors writer
leaves slices by rank that have to be consolidated before anything else can read them.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.config.shares import share_out
from te_models.distributed.collectives import largest
from te_models.distributed.control import Ranks
from te_models.distributed.dtensor import local, shard_like, whole
from te_models.errors import SaveError, UsageError
from te_models.files.atomic import first_line, replacing_folder, reraising
from te_models.files.formats import Document, Fields, Value
from te_models.files.tensors import write_safetensors
from te_models.fp8.scaling_state import fp8_state
from te_models.model.decoder import Decoder
from te_models.model.expert_parallel import stand_in
from te_models.model.tensor_parallel import gather_state, shard
from te_models.saving.folder import (
    UNDIVIDED,
    Content,
    TensorGroups,
    entry,
    finish_folder,
    prepare,
    refuse_foreign_files,
    write_index,
)
from te_models.saving.run_folder import MAX_FAILED_SAVES, Checkpoints, step_name

_OPTIMIZER = re.compile(r"optimizer\.(masters|state)\.(\d+)")
T = TypeVar("T")
# Group -> tensor name -> number of the file, which process `number % world` writes.
FilePlan = dict[str, dict[str, int]]


class ShardedCheckpoints(Checkpoints):
    """`Checkpoints` of a job of several processes, which all call `save` with the same names in the same order.

    Tensors may be DTensors. `latest` names a checkpoint only once the files of every process are durable.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        ranks: Ranks,
        model: Decoder,
        names: Mapping[str, Sequence[str]],
        fetch: Callable[[str, int, Tensor], Tensor],
        **options: Any,
    ) -> None:
        """Accept the options of Checkpoints, the names of the optimizer's entries by their kind, and its `fetch`."""
        super().__init__(root, **options)
        self.ranks = ranks
        self.model = model
        self.names = names
        self.fetch = fetch

    def save(
        self,
        step: int,
        tensors: TensorGroups,
        documents: Document,
        *,
        blocking: bool = True,
        copy_later: bool = False,
    ) -> Path:
        """Save as `Checkpoints.save` does, from all processes at once, which wait for it; `copy_later` changes nothing.

        With `blocking=False` a save that fails is logged, and the next save tries again, as there.

        Raises:
            UsageError: an argument cannot be saved exactly.
            SaveError: it failed on some process; earlier checkpoints are intact. All processes raise the same error.
        """
        # Enough failures in a row: raise the last one here instead of logging another.
        if self._failed_saves >= MAX_FAILED_SAVES and not blocking:
            self.wait()
        path = self.root / step_name(step)
        try:
            self._retrying(lambda: self._save(path, tensors, documents))
        except SaveError as error:
            if blocking:
                raise
            self._note_failure(error)
        return path

    def _save(self, path: Path, tensors: TensorGroups, documents: Document) -> None:
        """Save as `save` does. Rank 0 alone runs the functions that `from_first` gets; the others get its result."""
        content: list[Content] = []  # on rank 0

        def plan() -> FilePlan:
            shards = {}
            for group, members in tensors.items():
                shards[group] = {name: local(tensor) for name, tensor in members.items()}
            content.append(prepare(shards, documents))
            return self._assign_files(tensors, content[0].aliases)

        files = self.ranks.from_first(plan, UsageError)
        with ExitStack() as stack:

            def begin() -> str:
                real = Path(os.path.realpath(path))
                refuse_foreign_files(real)
                # Leftovers of a save that was killed; no process writes to them now.
                self.sweep()
                return str(stack.enter_context(replacing_folder(real)))

            folder = Path(self.ranks.from_first(begin, SaveError))
            totals: dict[str, int] = {}
            entries = self._write(folder, files, tensors, totals)

            def finish() -> None:
                for group, numbers in files.items():
                    places = {}
                    for name, number in numbers.items():
                        places[name] = _file(group, number, numbers)
                    entries.update(write_index(folder, group, places, totals.get(group, 0)))
                finish_folder(folder, entries, content[0])
                # Publishes the folder under its name, once all files are on disk; before `latest` names it.
                stack.close()
                self.publish(path)

            self.ranks.from_first(finish, SaveError)

    def _assign_files(self, tensors: TensorGroups, aliases: Document) -> FilePlan:
        """Assign the largest tensor first, each to the emptiest file, within the limit of a file's size."""
        plan: FilePlan = {}
        for group, members in tensors.items():
            sizes = {}
            for name, tensor in members.items():
                if name not in aliases.get(group, {}):
                    sizes[name] = tensor.numel() * tensor.itemsize
            # One file per process, or as many as their largest size asks for.
            needed = -(-sum(sizes.values()) // self.max_shard_bytes)
            count = max(min(self.ranks.world, len(sizes)), needed, 1)
            if group in UNDIVIDED:
                count = 1
            plan[group] = dict(zip(sizes, share_out(list(sizes.values()), count), strict=True))
        return plan

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        """Return the whole tensor, from its shards (FSDP), its parts (tensor parallelism) or the rank of the expert."""
        tensor = whole(tensor)
        model = self.model
        entry_of = _OPTIMIZER.match(name)
        if entry_of:
            number = int(entry_of[2])
            tensor = self.fetch(entry_of[1], number, tensor)
            # A tensor of the optimizer is divided like its parameter.
            if tensor.dim() and (model.tp.size > 1 or model.ep.size > 1):
                name = self.names[entry_of[1]][number]
        tensor = gather_state({name: tensor}, model.config, model.tp)[name]
        return model.ep.fetch(name, tensor, model.device)

    def _write(
        self, folder: Path, plan: FilePlan, tensors: TensorGroups, totals: dict[str, int]
    ) -> Fields:
        """Write this process's files, add each group's size to `totals`, return the manifest's entries of all files.

        The processes wait for each other's disks after each group, in the group of control messages: the next
        collective on tensors would take a process whose disk is slow for a dead one.
        """
        all_entries: Fields = {}
        for group, files in plan.items():
            own_files: dict[int, dict[str, Tensor]] = {}
            for number in files.values():
                if number % self.ranks.world == self.ranks.rank:
                    own_files[number] = {}
            for name, number in files.items():
                # A collective: on all processes.
                full = self._whole(name, tensors[group][name].detach())
                totals[group] = totals.get(group, 0) + full.numel() * full.itemsize
                if number in own_files:
                    # The others drop the tensor at once, so one whole tensor is alive at a time on each device.
                    own_files[number][name] = full.cpu()
            entries: Fields = {}
            failure = None
            try:
                for number, members in own_files.items():
                    file = _file(group, number, files)
                    entries[file] = entry(*write_safetensors(folder / file, members))
            except OSError as error:
                failure = f"rank {self.ranks.rank}: {first_line(error)}"
            failures = []
            for their_entries, their_failure in self.ranks.gather((entries, failure)):
                all_entries |= their_entries
                if their_failure:
                    failures.append(their_failure)
            if failures:
                raise SaveError(
                    f"could not save {folder.name}: {failures[0]}; earlier checkpoints are intact"
                )
        return all_entries


def _file(group: str, number: int, files: Mapping[str, int]) -> str:
    """Return the name of a file of a group, given the file of each tensor of the group."""
    count = max(files.values()) + 1
    if count == 1:
        return f"{group}.safetensors"
    return f"{group}-{number + 1:05d}-of-{count:05d}.safetensors"


def cut_optimizer_state(
    state: Fields,
    masters: Mapping[str, Sequence[Tensor]],
    model: Decoder,
    names: Mapping[str, Sequence[str]],
) -> Fields:
    """Return a saved optimizer state with this rank's shard of every tensor that belongs to a sharded master.

    `names` are the parameters of the whole model with an entry in "state" and in "masters", of which this rank may have
    only some; `masters` are the ones on this rank.

    Raises:
        CheckpointError: it is of other parameters.
    """

    def on_this_rank(kind: str) -> Iterator[tuple[str, Tensor, Any]]:
        """Yield name, master and saved value of this rank's entries."""
        if not state[kind]:
            return
        local_entries = list(model.ep.local_parameters(zip(names[kind], state[kind], strict=True)))
        for (name, value), master in zip(local_entries, masters[kind], strict=True):
            yield name, master, value

    def cut(name: str, master: Tensor, value: Value) -> Value:
        """Return this rank's shard of a value of the parameter `name`."""
        # Numbers such as the count of steps are the same on all ranks.
        if not isinstance(value, Tensor) or not value.dim():
            return value
        return shard_like(shard(name, value, model.config, model.tp), master)

    with reraising(
        "the optimizer's state is of other parameters",
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ):
        entries = []
        for name, master, values in on_this_rank("state"):
            entries.append({key: cut(name, master, value) for key, value in values.items()})
        own_masters = []
        for name, master, value in on_this_rank("masters"):
            own_masters.append(cut(name, master, value))
        return {**state, "state": entries, "masters": own_masters}


def whole_optimizer_state(
    state: Fields, model: Decoder, names: Mapping[str, Sequence[str]]
) -> Fields:
    """Return an optimizer's state with an entry per parameter of the whole model: the inverse of `cut_optimizer_state`.

    `names` are this rank's parameters with an entry in "state" and in "masters"; the entries of other ranks' are
    stand-ins, for `ShardedCheckpoints`.
    """

    def of_all_ranks(kind: str, other: Callable[[T], T]) -> list[T]:
        """Return a value per parameter of the whole model; `other` makes a stand-in of a value of this rank's."""
        if not state[kind]:
            return []
        # Under expert parallelism a rank has the experts that it owns, and stand-ins for the others.
        pairs = zip(names[kind], state[kind], strict=True)
        return [value for _, value in model.ep.every(pairs, other)]

    def stand_in_entry(entry: dict[str, Any]) -> dict[str, Any]:
        return {key: stand_in(value) for key, value in entry.items()}

    return {
        **state,
        "state": of_all_ranks("state", stand_in_entry),
        "masters": of_all_ranks("masters", stand_in),
    }


@torch.no_grad()
def shared_amaxes(model: Decoder) -> None:
    """Give every rank the largest amax that a rank recorded since the last update, so that any of them can save it.

    The next update takes the largest anyway, so this changes no scale.
    """
    rows: dict[dist.ProcessGroup | None, list[Tensor]] = {}
    for name, tensor in fp8_state(model).items():
        if name.endswith("amax_history"):
            rows.setdefault(model.ep.amax_group(name.rsplit(".", 2)[0], None), []).append(tensor[0])
    for group, group_rows in rows.items():
        for row, values in zip(group_rows, largest(group_rows, group), strict=True):
            row.copy_(values)
