"""Imports without searches for cycles among the objects that they make."""

import gc
import subprocess
import sys

import pytest

from te_models.garbage import collecting_later

COUNTED = """
import gc, sys
full = []
gc.callbacks.append(lambda phase, about: full.append(about["generation"]) if phase == "start" else None)
{start}
assert "torch" in sys.modules
print(full.count(2))
"""
COMMAND = """
sys.argv = ["te-models", "plan", "--preset", "gated-nano"]
import te_models.cli
te_models.cli.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("start", ["from te_models import Trainer", COMMAND])
def test_what_lives_until_the_end_is_not_searched(start: str) -> None:
    """Each search of all objects takes 0.4 s or more once torch is imported."""
    code = COUNTED.format(start=start)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) <= 2


def test_python_collects_again_afterwards() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError), collecting_later():
        assert not gc.isenabled()
        with collecting_later():
            pass
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
