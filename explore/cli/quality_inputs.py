"""What training and measuring of quality are given: a model, texts or a token file, a device."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sparda.engine.errors import SpardaError
from sparda.explore.cli.common import VALUE_BYTES, check_checkpoint, load_model, whole

if TYPE_CHECKING:
    from sparda.calibrate.measure.quality.documents import Document
    from sparda.engine.shapes import ModelShape, SparseSpec
    from sparda.engine.weights import Weights


class Tokens(Protocol):
    """A text, or a retrieval task, as token ids [tokens]."""

    @property
    def ids(self) -> Any: ...


def add_inputs(parser: argparse.ArgumentParser, dtype: str) -> None:
    """--checkpoint, --text or --tokens, --context, --local-blocks, --dtype and --seed."""
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="PATH", help="folder of safetensors, or a .gguf file"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path, nargs="+", metavar="FILE", help="UTF-8 texts")
    source.add_argument("--tokens", type=Path, metavar="FILE", help="a token file, whose documents have roles")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of a sequence (default: 8192, or the model's)")
    parser.add_argument(
        "--local-blocks", type=whole, default=1, metavar="N", help="forced blocks before a query's own (default: 1)"
    )
    parser.add_argument("--dtype", choices=list(VALUE_BYTES), default=dtype, help=f"of the weights (default: {dtype})")
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="decides what is drawn (default: 0)")


def documents_of(args: argparse.Namespace, role: str) -> tuple[Document, ...]:
    """The texts, or the token file's documents of that role. Raises SpardaError where there are none."""
    from sparda.calibrate.measure.quality.documents import read, tokenize

    check_checkpoint(args.checkpoint)
    if args.tokens:
        found = read(args.tokens).of_role(role)
        if not found:
            raise SpardaError(f"{args.tokens} has no document of the role {role!r}; write one, or give --text FILES.")
        return found
    from sparda.calibrate.measure.quality.corpus import Text
    from sparda.engine.tokenizer import tokenizer_of

    texts = [Text(path.stem, role, "text", path) for path in args.text]
    return tokenize(texts, tokenizer_of(args.checkpoint)).documents


def weights_of(args: argparse.Namespace) -> Weights:
    """The model, on a GPU where there is one."""
    import torch

    return load_model(args.checkpoint, "cuda" if torch.cuda.is_available() else "cpu", args.dtype)


def context_of(args: argparse.Namespace, weights: Weights) -> int:
    """Tokens of a sequence. Raises SpardaError for more than the model takes."""
    most = weights.shape.max_context
    context = min(8192, most) if args.context is None else args.context
    if not 64 <= context <= most:
        raise SpardaError(f"--context {context}; {weights.shape.name} takes 64 to {most} tokens.")
    return int(context)


def check_top_k(given: Sequence[int], spec: SparseSpec, context: int, most: int) -> None:
    """Refuse a top-k beyond ``most`` blocks, and one that leaves nothing to choose. Raises SpardaError."""
    least = spec.forced + 1
    if most < least:
        raise SpardaError(
            f"--context {context}: {spec.forced} blocks of {spec.block} tokens are always chosen, and nothing would be "
            "left to choose; give a longer --context, or fewer --local-blocks."
        )
    wrong = [k for k in given if not least <= k <= most]
    if wrong:
        raise SpardaError(
            f"--top-k {wrong[0]}: of the {spec.blocks(context)} blocks of {context} tokens {spec.forced} are always "
            f"chosen; give {least} to {most}, or a longer --context."
        )


def check_tokens(texts: Iterable[Tokens], shape: ModelShape, file: Path | None) -> None:
    """Refuse tokens that the model does not have: they are of another tokenizer. Raises SpardaError."""
    largest = max((int(t.ids.max(initial=0)) for t in texts), default=0)
    if largest >= shape.vocab:
        raise SpardaError(
            f"{file or 'the tokenizer'} has the token {largest}, and {shape.name} has {shape.vocab}, counted from 0; "
            "give one that was made with this model's tokenizer."
        )


@contextmanager
def within_memory(instead: str) -> Iterator[None]:
    """Say in a sentence that the GPU's memory did not do, and what to do ``instead``."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).split(". ")[0]
        raise SpardaError(f"{first}; {instead}.") from None
