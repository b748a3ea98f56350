"""Decode prompts greedily with a checkpoint's weights, as many at once as there are rows (needs a GPU)."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparda.engine.config import POLICIES
from sparda.engine.errors import SpardaError
from sparda.engine.shapes import SparseSpec
from sparda.explore.cli.common import (
    VALUE_BYTES,
    Output,
    add_json,
    add_overrides,
    check_checkpoint,
    load_model,
    require_engine,
    whole,
)

if TYPE_CHECKING:
    from sparda.engine.batch import Batch, Generation
    from sparda.engine.config import Config
    from sparda.engine.weights import Weights
    from sparda.explore.scenario import Scenario

TURNED = ("config.", "workload.batch")
"""What --set may change here: the rest of a workload follows from the prompts."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it was given: ``text`` or, without a tokenizer, ``ids``."""

    text: str = ""
    ids: tuple[int, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="PATH", help="folder of safetensors, or a .gguf file"
    )
    parser.add_argument("--forecast", type=Path, metavar="FILE", help="Forecast checkpoint (default: the proxy)")
    # One list for all three, so that the output is in the order of the command line.
    prompt: dict[str, Any] = {"dest": "prompts", "action": "append", "default": []}
    parser.add_argument("--prompt", type=_prompt, metavar="TEXT", help="a prompt (repeatable)", **prompt)
    parser.add_argument("--prompt-file", type=_file, metavar="FILE", help="a prompt's file (repeatable)", **prompt)
    parser.add_argument("--token-ids", type=_ids, metavar="LIST", help="a prompt such as 1,2,3 (repeatable)", **prompt)
    parser.add_argument(
        "--max-new", type=int, default=128, metavar="N", help="most new tokens for each prompt (default: 128)"
    )
    parser.add_argument("--policy", choices=POLICIES, metavar="NAME", help=f"of {', '.join(POLICIES)}")
    parser.add_argument(
        "--local-blocks",
        type=whole,
        default=SparseSpec().local_blocks,
        metavar="N",
        help="forced blocks before the one being written (default: 32, as MiniCPM4.1)",
    )
    parser.add_argument("--dtype", choices=list(VALUE_BYTES), default="bfloat16", help="of weights and KV cache")
    add_overrides(parser, "config.top_k=64 or workload.batch=4 (rows, 16 at most by default)")
    add_json(parser)


def run(args: argparse.Namespace) -> Output:
    """Decode. Raises SpardaError without torch, Triton or a GPU."""
    return generated(args, "generate", lambda _batch: nullcontext())


def generated(
    args: argparse.Namespace, command: str, beside: Callable[[Batch], AbstractContextManager[object]]
) -> Output:
    """Decode inside of what ``beside`` makes of the batch, for ``command``. Raises SpardaError as ``run`` does."""
    scenario = _scenario(args)
    if args.max_new < 1:
        raise SpardaError(f"--max-new {args.max_new}: ask for at least 1 new token.")
    if not args.prompts:
        raise SpardaError("no prompt is given; give --prompt TEXT, --prompt-file FILE or --token-ids 1,2,3.")
    require_engine(command)
    device = _device(command)
    tokenizer = _tokenizer(args.checkpoint, needed=any(p.text for p in args.prompts))
    prompts = [list(p.ids) or list(tokenizer.encode(p.text).ids) for p in args.prompts]
    from sparda.engine.batch import Batch
    from sparda.engine.tokenizer import end_tokens

    weights, forecast = _weights(args, scenario.config, device)
    batch = Batch(
        weights,
        scenario.config,
        rows=min(len(prompts), scenario.workload.batch),
        capacity=max(map(len, prompts)) + args.max_new,
        stop=end_tokens(args.checkpoint),
        spec=SparseSpec(local_blocks=args.local_blocks),
    )
    start = time.perf_counter()
    with beside(batch):
        found = batch.generate(prompts, args.max_new)
    seconds = time.perf_counter() - start
    decoded = sum(len(g.tokens) for g in found)
    print(f"{decoded} tokens in {seconds:.1f} s, {decoded / seconds:.1f} tokens/s, prefill included", file=sys.stderr)
    data: dict[str, object] = {
        "checkpoint": str(args.checkpoint),
        "config": asdict(batch.config),
        "dtype": args.dtype,
        "rows": batch.tiers.workload.batch,
        "forecast": forecast,
        "generations": [_plain(g, tokenizer) for g in found],
        "decoded": decoded,
        "seconds": seconds,
        "tokens_per_s": decoded / seconds,
        "misses_per_layer": batch.tiers.misses_per_layer(),
    }
    return Output(data, _text(found, tokenizer))


def _scenario(args: argparse.Namespace) -> Scenario:
    from sparda.explore.scenario import load_scenario

    for text in args.overrides:
        if not text.strip().startswith(TURNED):
            raise SpardaError(f"--set {text}: generate takes config.… and workload.batch (the rows decoded at once).")
    policy = [f"config.policy={args.policy}"] if args.policy else []
    return load_scenario(None, [*args.overrides, *policy])


def _device(command: str) -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") == "1":
        # Triton's interpreter: right for a tiny model, and slow.
        return "cpu"
    raise SpardaError(
        f"{command} decodes on a CUDA GPU and none is visible; run it on a machine with one (see `sparda doctor`)."
    )


def _tokenizer(path: Path, needed: bool) -> Any:
    """The checkpoint's tokenizer, or None where there is none and all prompts are token ids."""
    from sparda.engine.tokenizer import tokenizer_of

    check_checkpoint(path)
    try:
        found = tokenizer_of(path)
    except SpardaError:
        if needed:
            raise
        return None
    if found is None and needed:
        raise SpardaError(f"{path} has no tokenizer; give the prompts with --token-ids.")
    return found


def _weights(args: argparse.Namespace, config: Config, device: str) -> tuple[Weights, str]:
    """The model, and whose Forecast chooses: the ``checkpoint``'s, the ``proxy`` or ``none``."""
    trained = {"forecast": args.forecast, "lookahead": config.lookahead} if args.forecast else {}
    return _with_forecast(load_model(args.checkpoint, device, args.dtype, **trained), config)


def _with_forecast(weights: Weights, config: Config) -> tuple[Weights, str]:
    from sparda.engine.policies import projections
    from sparda.engine.weights import SELECTION, with_proxy_forecast

    layers = weights.shape.layers
    wanted = [set(projections(config, layer, layers)) & set(SELECTION) for layer in range(layers)]
    if not any(wanted):
        return weights, "none"
    if all(names <= set(w.selection) for names, w in zip(wanted, weights.layers, strict=True)):
        return weights, "checkpoint"
    print(
        f"no Forecast checkpoint: {config.policy} starts from the proxy, the mean of each later layer's own queries",
        file=sys.stderr,
    )
    return with_proxy_forecast(weights, config.lookahead), "proxy"


def _plain(generation: Generation, tokenizer: Any) -> dict[str, object]:
    return {
        "prompt_tokens": generation.prompt,
        "tokens": generation.tokens,
        "text": tokenizer.decode(generation.tokens) if tokenizer else None,
        "reason": generation.reason,
    }


def _text(found: list[Generation], tokenizer: Any) -> str:
    """One prompt's text alone; several numbered from 1."""
    texts = [tokenizer.decode(g.tokens) if tokenizer else ",".join(map(str, g.tokens)) for g in found]
    return texts[0] if len(texts) == 1 else "\n".join(f"[{i}] {text}" for i, text in enumerate(texts, 1))


def _prompt(text: str) -> Prompt:
    if not text:
        raise argparse.ArgumentTypeError("an empty prompt; give at least one word")
    return Prompt(text)


def _file(name: str) -> Prompt:
    try:
        return _prompt(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise argparse.ArgumentTypeError(f"{name}: cannot be read as text ({e}); check the path") from None


def _ids(text: str) -> Prompt:
    try:
        return Prompt(ids=tuple(int(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids such as 1,2,3") from None
