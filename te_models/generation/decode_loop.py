"""The loop that generates tokens with a KV cache: the prompt once, then one step of fixed shapes per token.

All tensors of a step stay at fixed addresses and a step needs nothing from the host, so on a GPU it is captured in a
CUDA graph once and replayed; otherwise the host would take longer to launch a step's kernels than the device to run
them. The same function runs eagerly everywhere else, with the same results. The host reads a token while the device
computes the next one.

Tensors and graphs are left for the next generation of the same shape (te_models.generation.decode_state). From the
second one on its prompt is replayed too, if it is short enough for the host to be the slower one.

Under an FP8 recipe the weights are quantized with the prompt and the FP8 data is reused in every step (one byte per
parameter), and by the next generation while the weights stay the same (te_models.fp8.kept_weights). On a CPU the
emulated engine also keeps copies of weights in the layout of its matrix products, if they are not too large (2 to 4
bytes per parameter).
"""

import contextlib
from collections.abc import Generator

import torch
from torch import Tensor

from te_models.fp8.kept_weights import WeightReuse, reused_weights
from te_models.fp8.region import is_trained
from te_models.generation.decode_state import DecodeState, DecodeStates, shape_of
from te_models.generation.sampling import Sampling
from te_models.model.decoder import Decoder
from te_models.model.rope import context_before_long_angles


@torch.no_grad()
def cached_tokens(
    model: Decoder,
    ids: Tensor,
    mask: Tensor | None,
    count: int,
    sampling: Sampling,
    seed: int | None,
    graph: bool,
) -> Generator[Tensor]:
    """Yield the tokens after a prompt, one step at a time: int64 [B] on the host.

    The weights must not change before the last token, since an FP8 recipe reuses their quantized values.

    Args:
        model: the decoder.
        ids: the prompt, int64 [B, S].
        mask: 1 for tokens and 0 for padding on the left, [B, S]; None: no padding.
        count: the number of tokens to generate per row.
        sampling: how a token is chosen.
        seed: of the random numbers; None: none are drawn.
        graph: whether the steps after the prompt run as a CUDA graph.
    """
    # Copies of the weights, quantized or laid out for a CPU's products, are kept for the next generation, and so are
    # CUDA graphs. A training run needs the memory for its next step, which changes the weights anyway.
    has_copies = model.recipe.quantized or ids.device.type == "cpu"
    keep = (has_copies or graph) and not is_trained(model)
    with reused_weights(model, model.te, keep=keep) as weights:
        shape = shape_of(model, ids, count, sampling)
        if graph:
            kept = weights.left if isinstance(weights.left, DecodeStates) else None
            weights.left = kept or DecodeStates(ids.device)
            state = weights.left.state_for(model, shape)
        else:
            state = DecodeState(model, shape)
        state.begin(ids, seed)
        loop = DecodeLoop(model, state, mask, weights)
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
    model: Decoder,
    ids: Tensor,
    mask: Tensor | None,
    count: int,
    sampling: Sampling,
    seed: int | None,
) -> Generator[Tensor]:
    """Yield the same tokens as `cached_tokens` without a cache: each step computes the whole sequence anew."""
    generator = torch.Generator(device=ids.device)
    if seed is not None:
        generator.manual_seed(seed)
    for _ in range(count):
        logits = model(ids, attention_mask=mask, logits_to_keep=1).logits[:, -1].float()
        new = sampling.pick(logits, generator)
        yield new.cpu()
        # The sequence has another length in each step, so no graph can replay it.
        ids = torch.cat((ids, new[:, None]), dim=1)  # [B, S + 1]
        mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=1)


class DecodeLoop:
    """One generation: a prompt that is in `state`, and the steps after it.

    Args:
        model: the decoder.
        state: the tensors and graphs, which the generation before may have left.
        mask: 1 for tokens of the prompt and 0 for padding, [B, S]; None: no padding.
        weights: the quantized weights.

    Attributes:
        restart_step: the step that computes all keys once more (LongRoPE); 0: none.
    """

    def __init__(
        self, model: Decoder, state: DecodeState, mask: Tensor | None, weights: WeightReuse
    ) -> None:
        self.model = model
        self.state = state
        self.mask = mask
        self.weights = weights
        self.restart_step = _restart_step(model, state.ids, mask)

    def launch(self, step: int) -> None:
        """Queue step number `step` and the copy of its tokens to the host, without waiting for either."""
        state = self.state
        if step == 0:
            self._begin()
        elif step == self.restart_step:
            self._restart(step)
        else:
            self._continue()
        if state.generated.is_cuda:
            state.host[step].copy_(state.generated[step], non_blocking=True)
            state.events.append(torch.cuda.Event())
            # The model's device need not be the current one.
            state.events[-1].record(torch.cuda.current_stream(state.generated.device))

    def tokens(self, step: int) -> Tensor:
        """Wait for a launched step and return its tokens, int64 [B] on the host."""
        if self.state.generated.is_cuda:
            self.state.events[step].synchronize()
        return self.state.host[step]

    def _begin(self) -> None:
        """Run the prompt: eagerly in the first generation with this state, afterwards as a graph.

        The mask of a padded prompt is made by the host, so it always runs eagerly.
        """
        state = self.state
        if state.prompt is None or state.generations == 1 or self.mask is not None:
            self._prompt()
        else:
            state.prompt(self._prompt)
        # A replay runs no Python, so the host counts the cached positions here.
        state.cache.length = state.shape.length
        self.weights.note_pass()

    def _prompt(self) -> None:
        """Compute the prompt from an empty cache."""
        if self.state.generations > 1:
            self.state.clear()
        self._forward(self.state.ids, self.mask)

    def _continue(self) -> None:
        """Run a step after the prompt: with a graph the first ever warms up, the next is captured, then it replays."""
        state = self.state
        length = state.cache.length
        if state.step is None:
            self.step()
        elif not state.is_warm:
            state.step.warm_up(self.step)
            state.is_warm = True
        else:
            state.step(self.step)
        # A replay counts no position, a failed capture and the eager step after it count two.
        state.cache.length = length + 1

    def _restart(self, step: int) -> None:
        """Compute all keys and values once more, with the RoPE angles that apply from this token on."""
        self.state.cache.clear()
        new_ids = self.state.generated[:step].T  # [step, B] -> [B, step]
        # New tokens are never padding.
        mask = None if self.mask is None else torch.nn.functional.pad(self.mask, (0, step), value=1)
        self._forward(torch.cat((self.state.ids, new_ids), dim=1), mask)

    def step(self) -> None:
        """Generate one token per row, with fixed shapes and addresses and no value that the host must read."""
        self._forward(self.state.last_token, None)

    def _forward(self, ids: Tensor, mask: Tensor | None) -> None:
        """Feed ids [B, S] to the model, and write the token that follows each row to `generated` and `last_token`."""
        state = self.state
        # Transformer Engine's flag: True quantizes the weights and keeps the copies, False reuses them, and None does
        # neither. The prompt makes the copies, unless they are left from the generation before; the steps reuse them.
        is_first_microbatch = None
        if self.model.recipe.quantized or ids.device.type == "cpu":
            is_first_microbatch = not self.weights.ready
        # inference_mode tracks no versions and views, which takes a twelfth less time on a CPU; with a GPU the host is
        # ahead anyway.
        untracked = ids.device.type == "cpu" and state.step is None
        with torch.inference_mode() if untracked else contextlib.nullcontext():
            output = self.model(
                ids,
                cache=state.cache,
                attention_mask=mask,
                logits_to_keep=1,
                is_first_microbatch=is_first_microbatch,
            )
            logits = output.logits[:, -1].float()  # [B, 1, V] -> [B, V]
            new = state.shape.sampling.pick(logits, state.generator)
            state.generated.index_copy_(0, state.done, new[None])
            state.last_token.copy_(new[:, None])
            state.done += 1


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
