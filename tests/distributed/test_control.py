"""Control messages between ranks, over gloo."""

from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks

from te_models.distributed.control import Ranks
from te_models.errors import SaveError


def exchange(rank: int, folder: str) -> None:
    ranks = Ranks(dist.group.WORLD)
    assert (ranks.rank, ranks.world, ranks.first) == (rank, 2, rank == 0)
    assert ranks.gather({"rank": rank, "text": "é" * rank}) == [
        {"rank": 0, "text": ""},
        {"rank": 1, "text": "é"},
    ]
    assert ranks.from_first(lambda: [rank, None]) == [0, None]
    wanted, message = (OSError, "^disk full$") if rank == 0 else (SaveError, "^rank 0: disk full$")

    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(wanted, match=message):
        ranks.from_first(fail, SaveError)


def test_values_and_failures_reach_every_rank(tmp_path: Path) -> None:
    run_ranks(exchange, tmp_path, 2)


def test_one_process_sends_nothing() -> None:
    ranks = Ranks()
    assert ranks.first and ranks.gather(3) == [3]
    with pytest.raises(OSError, match="^disk full$"):
        ranks.from_first(lambda: (_ for _ in ()).throw(OSError("disk full")))
