"""Control messages between ranks, over gloo."""

import subprocess
import sys
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


# So long a switch interval leaves the GIL with the main thread from the end of the exchange to the end of the process,
# while a gloo thread waits for it in order to free the message.
ENDS_AFTER_AN_EXCHANGE = """
import sys
import torch.distributed as dist
from te_models.distributed.control import Ranks

dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2)
sys.setswitchinterval(100)
assert Ranks(dist.new_group(backend="gloo")).gather("last words") == ["last words"] * 2
"""


@pytest.mark.slow
def test_a_process_may_end_right_after_an_exchange(tmp_path: Path) -> None:
    # Where the gloo thread holds the last reference, about one pair in two aborts.
    for attempt in range(8):
        meeting = str(tmp_path / f"pair-{attempt}")
        command = [sys.executable, "-c", ENDS_AFTER_AN_EXCHANGE]
        pair = [subprocess.Popen([*command, str(rank), meeting]) for rank in range(2)]
        assert [process.wait() for process in pair] == [0, 0]
