"""How retrieval tasks are worded: facts hidden in a text, and a question at its end that takes one or two of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from sparda.engine.errors import SpardaError


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_PLACES = _words(
    "Oslo Paris Cairo Lima Delhi Kyoto Quebec Dublin Athens Nairobi Havana Lisbon Madrid Vienna Warsaw Geneva Boston "
    "Denver Dallas Seattle Berlin London Moscow Sydney"
)
_PEOPLE = _words(
    "Maria John Peter Anna David Susan Robert Linda James Helen Thomas Karen Daniel Laura Michael Emma George Alice "
    "Henry Julia Martin Clara Simon Sarah"
)
_COLOURS = _words("blue red green white black yellow purple orange silver golden brown grey pink")


@dataclass(frozen=True, slots=True)
class Wording:
    """``links`` are the facts of one chain, in order; ``question`` is what the text ends in.

    Their fields: ``key`` is what is asked about, ``middle`` what the first of two links leads to, ``value`` a number.
    ``answer`` follows the question after a space: pieces that are scored, and between them, at odd places, pieces that
    are given.
    """

    name: str
    task: Literal["needle", "multihop"]
    links: tuple[str, ...]
    question: str
    keys: tuple[str, ...]
    middles: tuple[str, ...] = ()
    answer: tuple[str, ...] = ("{value}",)

    def chains(self, count: int, rng: np.random.Generator) -> list[dict[str, str]]:
        """``count`` chains in which no key, middle or value is there twice; a value is a number of five digits."""
        keys = rng.permutation(self.keys)[:count]
        middles = rng.permutation(self.middles)[:count] if self.middles else [""] * count
        values = rng.choice(90_000, count, replace=False) + 10_000
        return [
            {"key": str(k), "middle": str(m), "value": str(v)} for k, m, v in zip(keys, middles, values, strict=True)
        ]


_TURN = "<|im_end|>\n<|im_start|>assistant\n"
"""How ChatML lets the model speak; to a model without it, plain text."""

_PASSKEY = "The pass key of {0} is {{value}}. Remember it. {{value}} is the pass key of {0}.".format

WORDINGS = (
    Wording(
        "passkey",
        "needle",
        (_PASSKEY("{key}"),),
        f"What is the pass key of {{key}}?{_TURN}The pass key of {{key}} is",
        keys=_PLACES,
    ),
    Wording(
        "passkey-plain",
        "needle",
        (_PASSKEY("{key}"),),
        "What is the pass key of {key}? The pass key of {key} is",
        keys=_PLACES,
    ),
    Wording(
        "variable",
        "multihop",
        ("{key} = {middle}", "{middle} = {value}"),
        "{key} =",
        keys=_PLACES,
        middles=_PEOPLE,
        answer=("{middle}", "\n{middle} =", "{value}"),
    ),
    Wording(
        "pilot",
        "multihop",
        (
            "The pilot of the {key} ship is {middle}. Remember it. {middle} is the pilot of the {key} ship.",
            _PASSKEY("{middle}"),
        ),
        f"What is the pass key of the pilot of the {{key}} ship?{_TURN}"
        "The pass key of the pilot of the {key} ship is",
        keys=_COLOURS,
        middles=_PEOPLE,
    ),
)
"""``variable`` asks for both hops, one after the other; ``pilot`` for the number alone."""


def wording(name: str) -> Wording:
    """The wording of that name. Raises SpardaError where there is none."""
    for known in WORDINGS:
        if known.name == name:
            return known
    raise SpardaError(f"wording {name!r}; there are {', '.join(w.name for w in WORDINGS)}.")
