"""The tokens that end answers in the training data, at which a model that learned from it stops.

A base model may end a text with one token (<|endoftext|>) while the chat template ends each turn with another
(<|im_end|>). Trained on conversations, it writes the second one, and generation has to stop there.
"""

import numpy as np
from numpy.typing import NDArray

from te_models.data.encoding import Encoded
from te_models.data.tokenizer_base import Tokenizer

BLANKS = 8  # blank tokens after the token that ends an answer, such as a line break, that are looked past


def answer_ends(encoded: Encoded, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of the tokens that end answers and texts in `encoded`, in ascending order.

    An answer is a run of tokens that the loss counts. The token that ends it is the last one that is not blank: a
    special token that occurs nowhere else in an answer, or an added token for which that is so in all answers. The
    end-of-text token of the tokenizer always is one where it ends a text.
    """
    eos = tokenizer.eos_token_id
    if encoded.counted is None:  # texts, each of which ends with it
        return () if eos is None else (eos,)
    inside, begins = _documents(encoded)
    counted = inside & encoded.counted
    follows = np.append(counted[1:] & ~begins[1:], False)  # the next token continues this answer
    ends = np.flatnonzero(counted & ~follows)
    ends = _without_blanks(ends, encoded.tokens, counted, begins, tokenizer)
    if not len(ends):
        return ()
    marks = tokenizer.marks()
    ends_of_answers: list[int] = []
    tokens, numbers = np.unique(encoded.tokens[ends], return_counts=True)
    for token, number in zip(tokens.tolist(), numbers.tolist(), strict=True):
        if token == eos:
            ends_of_answers.append(token)
            continue
        if token not in marks:
            continue
        alone = number == np.count_nonzero(counted & (encoded.tokens == token))
        if alone and (marks[token] or number == len(ends)):
            ends_of_answers.append(token)
    return tuple(ends_of_answers)


def _documents(encoded: Encoded) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return for each token, bool [N], whether it is in one of the documents, and whether one begins there."""
    edges = np.zeros(len(encoded.tokens) + 1, dtype=np.int32)
    np.add.at(edges, encoded.starts, 1)
    np.add.at(edges, encoded.starts + encoded.lengths, -1)
    inside = np.cumsum(edges)[:-1] > 0
    begins = np.zeros(len(encoded.tokens), dtype=np.bool_)
    begins[encoded.starts] = True
    return inside, begins


def _without_blanks(
    ends: NDArray[np.int64],
    tokens: NDArray[np.int32],
    counted: NDArray[np.bool_],
    begins: NDArray[np.bool_],
    tokenizer: Tokenizer,
) -> NDArray[np.int64]:
    """Return the places of the last tokens of answers that are not blank; answers of blanks alone are left out."""
    marks = tokenizer.marks()
    # One step back per round: an answer may end in a few tokens of white space.
    for _ in range(BLANKS):
        blank_ids = []
        for token in np.unique(tokens[ends]).tolist():
            if token not in marks and not tokenizer.decode([token]).strip():
                blank_ids.append(token)
        blank = np.isin(tokens[ends], blank_ids)
        if not blank.any():
            break
        # A blank that is the first token of its answer has nothing before it to go back to.
        first = begins[ends] | ~counted[ends - 1]
        ends = np.where(blank, ends - 1, ends)[~(blank & first)]
    return ends
