"""Captures of CUDA graphs."""

from typing import Any

import pytest
import torch

from te_models.device.cuda_capture import capture

CYCLES = 200_000_000  # of a GPU's clock: 0.1 s


class LateCapture(torch.cuda.CUDAGraph):
    """A graph whose capture begins while its stream is still busy, as on a GPU that many processes share."""

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda._sleep(CYCLES)
        super().capture_begin(*args, **kwargs)


@pytest.mark.gpu
def test_the_first_replay_draws_the_numbers_of_an_eager_step() -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    wanted = [torch.rand(8, device="cuda", generator=generator) for _ in range(3)]
    generator.manual_seed(3)
    drawn = [torch.rand(8, device="cuda", generator=generator)]  # so that the offset is not zero
    graph, stream = LateCapture(), torch.cuda.Stream()
    graph.register_generator_state(generator)
    numbers = torch.zeros(8, device="cuda")
    with capture(graph, stream, generator):
        # What the capture itself does to the generator would come before the numbers are drawn, but for its order.
        torch.cuda._sleep(3 * CYCLES)
        numbers.copy_(torch.rand(8, device="cuda", generator=generator))
    for _ in range(2):
        graph.replay()
        drawn.append(numbers.clone())
    assert torch.equal(torch.stack(drawn), torch.stack(wanted))
