"""The loop that generates tokens with a KV cache: the prompt once, then one step of fixed shapes per token.

All tensors of a step stay at fixed addresses and a step needs nothing from the host, so on a GPU it is captured in a
CUDA graph once and replayed; otherwise the host would take longer to launch a step's kernels than the device to run
them. The same function runs eagerly everywhere else, with the same results. The host reads a token while the device
computes the next one.

Under an FP8 recipe the weights are quantized with the prompt and the FP8 data is reused in every step (one byte per
parameter), and by the next generation while the weights stay the same (te_models.fp8.kept_weights). On a CPU the
emulated engine also keeps copies of weights in the layout of its matrix products, if they are not too large (2 to 4
bytes per parameter).
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
    """Yield the tokens after a prompt, one step at a time: int64 [B] on the host.

    The weights must not change before the last token, since an FP8 recipe reuses their quantized values.

    Args:
        model: the decoder.
        ids: the prompt, int64 [B, S].
        mask: 1 for tokens and 0 for padding on the left, [B, S]; None: no padding.
        count: the number of tokens to generate per row.
        pick: returns the next token per row, int64 [B], for logits FP32 [B, V].
        generator: the source of the random numbers that `pick` draws.
        graph: whether the steps after the prompt run as a CUDA graph.
    """
    # Copies of the weights, quantized or laid out for a CPU's products, are kept for the next generation. Under BF16 on
    # a GPU there are none. A training run needs the memory for its next step, which changes the weights anyway.
    has_copies = model.recipe.quantized or ids.device.type == "cpu"
    with reused_weights(model, model.te, keep=has_copies and not is_trained(model)) as weights:
        loop = DecodeLoop(
            model,
            ids=ids,
            mask=mask,
            count=count,
            pick=pick,
            generator=generator,
            graph=graph,
            weights=weights,
        )
        # On a GPU one step is launched ahead: the device computes it while the host handles the token before.
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
    """Yield the same tokens as `cached_tokens` without a cache: each step computes the whole sequence anew."""
    for _ in range(count):
        new = pick(model(ids, attention_mask=mask, logits_to_keep=1).logits[:, -1].float())
        yield new.cpu()
        # The sequence has another length in each step, so no graph can replay it.
        ids = torch.cat((ids, new[:, None]), dim=1)  # [B, S + 1]
        mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=1)


class DecodeLoop:
    """The state of one generation on the device.

    Attributes:
        last_token: int64 [B, 1], the input of the next step.
        generated: int64 [count, B], all tokens so far; later rows are zero.
        done: int64 [1], number of steps so far, on the device.
        restart_step: the step that computes all keys once more (LongRoPE); 0: none.
        cached_steps: number of steps so far that read the cache: all but the prompt and `restart_step`.
    """

    def __init__(
        self,
        model: Decoder,
        *,
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
        # A step writes one row of [count, B]; its index, `done`, is a tensor, so that a replayed graph writes the next.
        self.generated = ids.new_zeros(count, batch)
        self.done = ids.new_zeros(1)
        self.restart_step = _restart_step(model, ids, mask)
        self.cached_steps = 0
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
        self.cached_steps += 1
        if self.graph is None:
            self.step()
        elif self.cached_steps == 1:
            self._warm_up()
        elif self.cached_steps == 2:
            self._capture()
        else:
            # A replay runs no Python, so the host counts the cached positions here.
            self.cache.length += 1
            self.graph.replay()

    def _restart(self, step: int) -> None:
        """Compute all keys and values once more, with the RoPE angles that apply from this token on."""
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
        # A capture advances the host's count of positions though no kernel has run: a failed one sets it back.
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
        # Transformer Engine's flag: True quantizes the weights and keeps the copies, False reuses them, and None does
        # neither. The prompt makes the copies, unless they are left from the generation before; the steps reuse them.
        is_first_microbatch = None
        if self.model.recipe.quantized or ids.device.type == "cpu":
            is_first_microbatch = not self.weights.ready
        # inference_mode tracks no versions and views, which takes a twelfth less time on a CPU; with a GPU the host is
        # ahead anyway.
        untracked = ids.device.type == "cpu" and self.graph is None
        with torch.inference_mode() if untracked else contextlib.nullcontext():
            output = self.model(
                ids,
                cache=self.cache,
                attention_mask=mask,
                logits_to_keep=1,
                is_first_microbatch=is_first_microbatch,
            )
            new = self.pick(output.logits[:, -1].float())  # [B, 1, V] -> [B]
            self.generated.index_copy_(0, self.done, new[None])
            self.last_token.copy_(new[:, None])
            self.done += 1

    def _warm_up(self) -> None:
        """Run a step on the capture's stream: libraries allocate workspaces there and kernels are compiled."""
        current = torch.cuda.current_stream(self.generated.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            self.step()
        # Both streams use the same cache: each waits for the other.
        current.wait_stream(self.stream)
        # An unregistered generator would draw the same numbers in each replay.
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
