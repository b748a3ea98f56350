"""How retrieval tasks are worded: facts hidden in a text, and a question at its end that takes one or two of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

_PLACES = tuple(
    "Oslo Paris Cairo Lima Delhi Kyoto Quebec Dublin Athens Nairobi Havana Lisbon Madrid Vienna Warsaw Geneva Boston "
    "Denver Dallas Seattle Berlin London Moscow Sydney".split()
)
_PEOPLE = tuple(
    "Maria John Peter Anna David Susan Robert Linda James Helen Thomas Karen Daniel Laura Michael Emma George Alice "
    "Henry Julia Martin Clara Simon Sarah".split()
)
_COLOURS = tuple("blue red green white black yellow purple orange silver golden brown grey pink".split())
_X = tuple(f"x{n}" for n in range(10, 60))
_Y = tuple(f"y{n}" for n in range(10, 60))


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
        """``count`` chains in which no key, middle or value is there twice, each value a number of five digits."""
        keys = rng.permutation(self.keys)[:count]
        numbers = rng.choice(90_000, 2 * count, replace=False) + 10_000
        middles, values = rng.permutation(self.middles)[:count] if self.middles else numbers[:count], numbers[count:]
        return [
            {"key": str(k), "middle": str(m), "value": str(v)} for k, m, v in zip(keys, middles, values, strict=True)
        ]


_MAGIC = "One of the special magic numbers for {0} is: {{value}}.".format
_ASKED = "The special magic number for {0} mentioned in the text is:".format
_PASS = "The pass key of {0} is {{value}}. Remember it. {{value}} is the pass key of {0}.".format
_PILOT = "The pilot of the {key} ship is {middle}."

CANDIDATES = (
    Wording("magic", "needle", (_MAGIC("{key}"),), _ASKED("{key}"), _PLACES),
    Wording("passkey", "needle", (_PASS("{key}"),), "What is the pass key of {key}? The pass key of {key} is", _PLACES),
    Wording("number", "needle", ("The secret number of {key} is {value}.",), "The secret number of {key} is", _PLACES),
    Wording("assign", "needle", ("{key} = {value}",), "print({key}) prints", _X),
    Wording(
        "chain",
        "multihop",
        (_PILOT, _MAGIC("{middle}")),
        "The pilot of the {key} ship is",
        _COLOURS,
        _PEOPLE,
        ("{middle}", ". " + _ASKED("{middle}"), "{value}"),
    ),
    Wording(
        "chain-passkey",
        "multihop",
        (_PILOT, _PASS("{middle}")),
        "The pilot of the {key} ship is",
        _COLOURS,
        _PEOPLE,
        ("{middle}", ". What is the pass key of {middle}? The pass key of {middle} is", "{value}"),
    ),
    Wording(
        "chain-variable",
        "multihop",
        ("{key} = {middle}", "{middle} = {value}"),
        "{key} =",
        _Y,
        _X,
        ("{middle}", " =", "{value}"),
    ),
    Wording(
        "pilot",
        "multihop",
        (_PILOT, "The secret number of {middle} is {value}."),
        "The secret number of the pilot of the {key} ship is",
        _COLOURS,
        _PEOPLE,
    ),
    Wording(
        "lives",
        "multihop",
        ("{key} lives in {middle}.", _MAGIC("{middle}")),
        "The special magic number for the city where {key} lives is:",
        _PEOPLE,
        _PLACES,
    ),
    Wording("variable", "multihop", ("{key} = {middle}", "{middle} = {value}"), "print({key}) prints", _Y, _X),
    Wording(
        "few",
        "multihop",
        (_PILOT, "The secret number of {middle} is {value}."),
        "The pilot of the wooden ship is Eric. The secret number of Eric is 30718. The secret number of the pilot of the wooden ship is 30718.\nThe secret number of the pilot of the {key} ship is",
        _COLOURS,
        _PEOPLE,
    ),

    Wording("chain-city", "multihop", ("One of the special magic cities for {key} is: {middle}.", _MAGIC("{middle}")), "The special magic city for {key} mentioned in the text is:", _PEOPLE, _PLACES, ("{middle}", ". " + _ASKED("{middle}"), "{value}")),
    Wording("chain-lives", "multihop", ("{key} lives in {middle}. Remember it. {middle} is where {key} lives.", _PASS("{middle}")), "Where does {key} live? {key} lives in", _PEOPLE, _PLACES, ("{middle}", ". What is the pass key of {middle}? The pass key of {middle} is", "{value}")),
    Wording("chain-number", "multihop", ("The pass word of {key} is {middle}. Remember it. {middle} is the pass word of {key}.", _PASS("{middle}")), "What is the pass word of {key}? The pass word of {key} is", _PLACES, _PEOPLE, ("{middle}", ". What is the pass key of {middle}? The pass key of {middle} is", "{value}")),

    Wording("chain-box", "multihop", ("The pass key of {key} is {middle}. Remember it. {middle} is the pass key of {key}.", "The pass key {middle} opens box {value}."), "What is the pass key of {key}? The pass key of {key} is", _PLACES, (), ("{middle}", ". The pass key {middle} opens box", "{value}")),
    Wording("box", "multihop", ("The pass key of {key} is {middle}. Remember it. {middle} is the pass key of {key}.", "The pass key {middle} opens box {value}."), "The pass key of {key} opens box", _PLACES),

    Wording("chain-pp", "multihop", ("The pass key of {key} is {middle}. Remember it. {middle} is the pass key of {key}.", _PASS("{middle}")), "What is the pass key of {key}? The pass key of {key} is", _PLACES, (), ("{middle}", ". What is the pass key of {middle}? The pass key of {middle} is", "{value}")),
    Wording("chain-mm", "multihop", ("One of the special magic numbers for {key} is: {middle}.", _MAGIC("{middle}")), _ASKED("{key}"), _PLACES, (), ("{middle}", ". " + _ASKED("{middle}"), "{value}")),
    Wording("chain-pm", "multihop", ("The pass key of {key} is {middle}. Remember it. {middle} is the pass key of {key}.", "The box with the number {middle} holds the number {value}. Remember it. The box with the number {middle} holds the number {value}."), "What is the pass key of {key}? The pass key of {key} is", _PLACES, (), ("{middle}", ". The box with the number {middle} holds the number", "{value}")),

    Wording("chain-rep", "multihop", ("The pilot of the {key} ship is {middle}. Remember it. {middle} is the pilot of the {key} ship.", _PASS("{middle}")), "Who is the pilot of the {key} ship? The pilot of the {key} ship is", _COLOURS, _PEOPLE, ("{middle}", ". What is the pass key of {middle}? The pass key of {middle} is", "{value}")),
    Wording("chain-of", "multihop", ("The pilot of {key} is {middle}. Remember it. {middle} is the pilot of {key}.", "The pass key of pilot {middle} is {value}. Remember it. {value} is the pass key of pilot {middle}."), "Who is the pilot of {key}? The pilot of {key} is", _PLACES, _PEOPLE, ("{middle}", ". What is the pass key of pilot {middle}? The pass key of pilot {middle} is", "{value}")),
)
