"""A byte-level BPE of a few hundred tokens, with merges across line ends and blanks, like a real one's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MERGES = ["Ċ Ċ", "ĊĊ Ċ", "Ġ Ġ", ". Ċ", "t h", "th e", "Ġ c", "Ġc a", "Ġca t", "Ġ s", "Ġs a", "Ġsa t", "a t"]


def small_tokenizer() -> Tokenizer:
    """Cuts text as SmolLM2's does: digits one by one, words with the blank before them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]
    vocab = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(vocab=vocab, merges=[(a, b) for a, b in (m.split(" ") for m in MERGES)])
    tokenizer: Tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
