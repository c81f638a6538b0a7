"""The loop that generates tokens with a KV cache: the prompt once, then one step of fixed shapes per token.

All tensors of a step stay at fixed addresses and a step needs nothing from the host, so on a GPU it is captured in a
CUDA graph once and replayed; otherwise the host would take longer to launch a step's kernels than the device to run
them. The same function runs eagerly everywhere else, with the same results. The host reads a token while the device
computes the next one.

Under an FP8 recipe the weights are quantized with the prompt and the FP8 data is reused in every step (one byte per
parameter), and by the next generation while the weights stay the same (te_models.fp8.kept_weights). The emulated engine
also keeps what its products on a CPU take, of weights that are not too large (2 to 4 bytes per parameter).
"""

import contextlib
import logging
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from te_models.device.cuda_capture import capture, failed_capture, first_error
from te_models.fp8.kept_weights import WeightReuse, reused_weights
from te_models.fp8.region import is_trained
from te_models.model.decoder import Decoder
from te_models.model.rope import context_before_long_angles

Pick = Callable[[Tensor], Tensor]  # logits FP32 [B, V] -> tokens int64 [B]

log = logging.getLogger(__name__)


@torch.no_grad()
def cached_tokens(
    model: Decoder,
    ids: Tensor,
    mask: Tensor | None,
    count: int,
    pick: Pick,
    generator: torch.Generator,
    graph: bool,
) -> Generator[Tensor]:
    """Yield the `count` tokens after `ids` [B, S], int64 [B] on the host, one step at a time.

    `graph` captures the steps after the first in a CUDA graph; `pick` draws from `generator`. The weights must not
    change before the last token, since an FP8 recipe reuses their quantized values.
    """
    # Copies of the weights, quantized or laid out for a CPU's products, are kept for the next generation. On a GPU
    # there are none under BF16. A training run needs the memory for its next step, which changes the weights anyway.
    has_copies = model.recipe.quantized or ids.device.type == "cpu"
    with reused_weights(model, model.te, keep=has_copies and not is_trained(model)) as weights:
        loop = DecodeLoop(model, ids, mask, count, pick, generator, graph, weights)
        # One step ahead of the reader: the device computes it while the host handles the token before.
        ahead = int(ids.is_cuda)
        launched = 0
        for step in range(count):
            while launched < min(count, step + 1 + ahead):
                loop.launch(launched)
                launched += 1
            yield loop.tokens(step)


@torch.no_grad()
def recomputed_tokens(
    model: Decoder, ids: Tensor, mask: Tensor | None, count: int, pick: Pick
) -> Generator[Tensor]:
    """Yield the same tokens without a cache, by recomputing the whole sequence for each."""
    for _ in range(count):
        new = pick(model(ids, attention_mask=mask, logits_to_keep=1).logits[:, -1].float())
        yield new.cpu()
        # The whole text again, of another length in each step: no graph and no cached shapes.
        ids = torch.cat((ids, new[:, None]), dim=1)  # [B, S + 1]
        mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=1)


class DecodeLoop:
    """The state of one generation on the device.

    Attributes:
        last_token: int64 [B, 1], the input of the next step.
        generated: int64 [count, B], all tokens so far.
        done: int64 [1], number of steps so far.
        restart_step: the step before which all keys are computed once more; 0: none.
        eager: number of steps after the prompt that ran without the graph.
    """

    def __init__(
        self,
        model: Decoder,
        ids: Tensor,
        mask: Tensor | None,
        count: int,
        pick: Pick,
        generator: torch.Generator,
        graph: bool,
        weights: WeightReuse | None = None,
    ) -> None:
        batch, length = ids.shape
        self.weights = WeightReuse([]) if weights is None else weights
        self.model = model
        self.ids = ids
        self.mask = mask
        self.pick = pick
        self.generator = generator
        self.cache = model.new_cache(batch, length + count)
        log.info("%r", self.cache)
        self.last_token = ids.new_zeros(batch, 1)
        # [count, B]: a step writes one row, whose place is a tensor, so that a graph can replay it.
        self.generated = ids.new_zeros(count, batch)
        self.done = ids.new_zeros(1)
        self.restart_step = _restart_step(model, ids, mask)
        self.eager = 0
        self.graph: Any = torch.cuda.CUDAGraph() if graph else None
        self.stream: Any = torch.cuda.Stream(ids.device) if graph else None
        if ids.is_cuda:
            # Pinned: a copy to other memory would wait for the device.
            self.host = torch.empty(count, batch, dtype=torch.long, pin_memory=True)
        else:
            self.host = self.generated
        self.events: list[Any] = []

    def launch(self, step: int) -> None:
        """Queue step number `step` and the copy of its tokens to the host, without waiting for either."""
        if step == 0:
            self._forward(self.ids, self.mask)
            self.weights.note_pass()
        elif step == self.restart_step:
            self._restart(step)
        else:
            self._replay_or_step()
        if self.generated.is_cuda:
            self.host[step].copy_(self.generated[step], non_blocking=True)
            self.events.append(torch.cuda.Event())
            self.events[-1].record()

    def _replay_or_step(self) -> None:
        """Run a step after the prompt: with a graph the first warms up, the second is captured, later ones replay."""
        self.eager += 1
        if self.graph is None:
            self.step()
        elif self.eager == 1:
            self._warm_up()
        elif self.eager == 2:
            self._capture()
        else:
            # A replay runs no Python, so the host's count is kept here.
            self.cache.length += 1
            self.graph.replay()

    def _restart(self, step: int) -> None:
        """Compute all keys and values once more, with the angles that apply from this token on."""
        self.cache.clear()
        new_ids = self.generated[:step].T  # [step, B] -> [B, step]
        # New tokens are never padding.
        mask = None if self.mask is None else torch.nn.functional.pad(self.mask, (0, step), value=1)
        self._forward(torch.cat((self.ids, new_ids), dim=1), mask)

    def tokens(self, step: int) -> Tensor:
        """Wait for a launched step and return its tokens, int64 [B] on the host."""
        if self.generated.is_cuda:
            self.events[step].synchronize()
        return self.host[step]

    def step(self) -> None:
        """Generate one token per row, with fixed shapes and addresses and no value that the host must read."""
        self._forward(self.last_token, None)

    def _capture(self) -> None:
        """Capture a step and replay it. If another thread disturbs the capture, all steps from here run eagerly."""
        # A capture advances the host's count though nothing has run: it is set back if the capture fails.
        length = self.cache.length
        try:
            with capture(self.graph, self.stream, self.generator):
                self.step()
        except RuntimeError as error:
            if not failed_capture(error):
                raise
            log.warning(
                "generation goes on without its CUDA graph: %s",
                str(first_error(error)).splitlines()[0],
            )
            self.graph = None
            self.cache.length = length
            self.step()
            return
        self.graph.replay()

    def _forward(self, ids: Tensor, mask: Tensor | None) -> None:
        """Feed ids [B, S] to the model, and write the token that follows each row to `generated` and `last_token`."""
        # The prompt quantizes the weights unless they are kept from the generation before, and on a CPU lays out those
        # in BF16 for its products; the steps reuse them.
        first = None
        if self.model.recipe.quantized or ids.device.type == "cpu":
            first = not self.weights.ready
        options = dict(
            cache=self.cache, attention_mask=mask, logits_to_keep=1, is_first_microbatch=first
        )
        # Without versions and views to track a CPU takes a twelfth less; a GPU's host is ahead anyway.
        untracked = ids.device.type == "cpu" and self.graph is None
        with torch.inference_mode() if untracked else contextlib.nullcontext():
            new = self.pick(self.model(ids, **options).logits[:, -1].float())
            # The place is a tensor on the device, so that a graph's replay writes the next row each time.
            self.generated.index_copy_(0, self.done, new[None])
            self.last_token.copy_(new[:, None])
            self.done += 1

    def _warm_up(self) -> None:
        """Run a step on the stream of the capture, where libraries allocate workspaces and kernels are compiled."""
        current = torch.cuda.current_stream(self.generated.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            self.step()
        # Both streams use the same cache: each waits for the other.
        current.wait_stream(self.stream)
        # Without it each replay would draw the numbers of the capture again.
        self.graph.register_generator_state(self.generator)


def _restart_step(model: Decoder, ids: Tensor, mask: Tensor | None) -> int:
    """Return the step at which the longest row exceeds LongRoPE's original context; 0 if none does.

    All angles change there. transformers also recomputes all of a Phi-3's text at that point.
    """
    original = context_before_long_angles(model.config.rope)
    if original is None:
        return 0
    # Padding has no position.
    longest = ids.shape[1] if mask is None else int(mask.sum(-1).max())
    return max(0, original - longest + 1)
