"""Clean stops: Ctrl-C, SIGTERM and a terminal that closes end a run after its current step."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the number of the signal that arrived, SIGINT (Ctrl-C), SIGTERM or SIGHUP; 0: none.

    A second signal has its usual effect. Outside the main thread signals cannot be handled: the caller's handlers stay,
    and the function returns 0.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        # At once, and not at the end of the step: a second signal has to stop a step that hangs.
        signal.signal(number, before[number])

    numbers = [signal.SIGINT, signal.SIGTERM]
    hang_up = getattr(signal, "SIGHUP", None)  # of a terminal that closes; Windows has none
    if hang_up is not None and signal.getsignal(hang_up) != signal.SIG_IGN:  # which nohup sets
        numbers.append(hang_up)
    before = {int(number): signal.getsignal(number) for number in numbers}
    try:
        for number in before:
            signal.signal(number, note)
    # signal.signal raises it outside the main thread.
    except ValueError:
        yield lambda: 0
        return
    try:
        yield lambda: received[0] if received else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
