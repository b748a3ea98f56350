"""Tokenizers of models: a folder's ``tokenizer.json``, or byte-level BPE built from a GGUF file's metadata."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparda.engine.errors import SpardaError
from sparda.engine.gguf_reader import GgufFile
from sparda.engine.loader import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = ("gpt-2", "smollm", "llama-bpe")
"""Ways of cutting text into words that are known, by the name in a GGUF file's ``tokenizer.ggml.pre``."""

_CONTROL, _USER_DEFINED = 3, 4


def tokenizer_of(path: Path) -> Tokenizer:
    """The tokenizer of a model: ``path`` is its folder, its ``tokenizer.json``, or a GGUF file.

    Raises SpardaError where there is none, where a package is missing, and for a kind that is not byte-level BPE with
    one of ``PRE_TOKENIZERS``.
    """
    if path.suffix == ".gguf":
        return _from_gguf(GgufFile(path))
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise SpardaError(f"{file}: there is no such file; give the model's tokenizer.json, or a GGUF file.")
    package = _package()
    try:
        return package.Tokenizer.from_file(str(file))  # type: ignore[no-any-return]
    except Exception as error:
        # The package raises bare exceptions for whatever is wrong with the file.
        raise SpardaError(f"{file}: not a tokenizer that can be read ({error}); fetch it anew.") from None


def end_tokens(path: Path) -> tuple[int, ...]:
    """Token ids that end a text, as a GGUF file, a ``generation_config.json`` or a ``config.json`` states them."""
    if path.suffix == ".gguf":
        file = GgufFile(path)
        found = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        return tuple(dict.fromkeys(int(token) for token in found if token is not None))
    for name in ("generation_config.json", "config.json"):
        given = read_json(path / name).get("eos_token_id") if (path / name).is_file() else None
        tokens = given if isinstance(given, list) else [given]
        if tokens and all(isinstance(token, int) for token in tokens):
            return tuple(tokens)
    return ()


def _from_gguf(file: GgufFile) -> Tokenizer:
    t = _package()
    key = "tokenizer.ggml."
    kind, pre = file.get(key + "model"), file.get(key + "pre", "gpt-2")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise SpardaError(
            f"{file.path}: its tokenizer is {kind!r} with pre-tokenizer {pre!r}; byte-level BPE ('gpt2') with "
            f"{', '.join(PRE_TOKENIZERS)} is known: give the model's tokenizer.json."
        )
    tokens, merges, types = (file.get(key + name) for name in ("tokens", "merges", "token_type"))
    if not tokens or merges is None:
        raise SpardaError(f"{file.path}: has no tokens or merges; give the model's tokenizer.json.")
    model = t.models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ", 1)) for merge in merges],
        # Llama 3 takes a word that is a token as it is, without merging up to it.
        ignore_merges=pre == "llama-bpe",
    )
    tokenizer: Tokenizer = t.Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(t, pre)
    tokenizer.decoder = t.decoders.ByteLevel()
    added = [
        t.AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types or [], strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])
    first = file.get(key + "bos_token_id")
    if first is not None and file.get(key + "add_bos_token", pre == "llama-bpe"):
        tokenizer.post_processor = t.processors.TemplateProcessing(
            single=f"{tokens[first]} $A", special_tokens=[(tokens[first], first)]
        )
    return tokenizer


def _pre_tokenizer(t: Any, pre: str) -> Any:
    cut = t.pre_tokenizers
    if pre == "smollm":
        return cut.Sequence([cut.Digits(individual_digits=True), cut.ByteLevel(add_prefix_space=False)])
    if pre == "gpt-2":
        return cut.ByteLevel(add_prefix_space=False)
    words = cut.Split(t.Regex(_LLAMA_3), behavior="isolated")
    return cut.Sequence([words, cut.ByteLevel(add_prefix_space=False, use_regex=False)])


def _package() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise SpardaError(
            "text needs a package that is not installed: pip install 'sparda[tokenizer]'; token ids do without it."
        ) from None
    return tokenizers
