"""Checkpoints of a training: the public form, whole or not there, and enough in them to go on from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparda.engine.errors import SpardaError
from sparda.engine.tensor_file import save_torch

_NAME = re.compile(r"ckpt-(\d+)\.pt")


def steps_in(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, ascending."""
    names = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(m[1]) for f in names if (m := _NAME.fullmatch(f.name)))


def path_of(folder: Path, step: int) -> Path:
    """The checkpoint's file."""
    return folder / f"ckpt-{step}.pt"


def save(
    folder: Path,
    values: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    step: int,
    facts: Mapping[str, object],
    keep: int,
) -> None:
    """Write the checkpoint of ``step``; only then remove all but the last ``keep``.

    ``values`` are stored as they are, fp32. ``facts``: what the training is, which a resumed one must agree with.
    """
    batch = int(str(facts["batch"]))
    content = {
        "model_state_dict": {name: t.detach().cpu() for name, t in values.items()},
        "step": step,
        "micro_batches_seen": step * batch,
        "gradient_accumulation_steps": batch,
        "world_size": 1,
        "optimizer_state_dict": optimizer.state_dict(),
        "scheduler_state_dict": {},
        "sparse_config": dict(facts),
        "base_model_path": facts["model"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_torch(path_of(folder, step), content)
    for old in steps_in(folder)[:-keep]:
        path_of(folder, old).unlink(missing_ok=True)


def load(
    folder: Path,
    values: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    step: int,
    facts: Mapping[str, object],
) -> None:
    """Set ``values`` and the optimizer to what they were after ``step``.

    Raises SpardaError for a damaged file and for one of a training that was another in anything but its length.
    """
    path = path_of(folder, step)
    content = read(path)
    check_same(path, content.get("sparse_config"), facts)
    stored, state = content["model_state_dict"], content.get("optimizer_state_dict")
    sizes = ({name: tuple(t.shape) for name, t in tensors.items()} for tensors in (stored, values))
    if state is None or next(sizes) != next(sizes):
        raise SpardaError(f"{path}: holds other tensors than this training has; give a new --out.")
    with torch.no_grad():
        for name, tensor in values.items():
            tensor.copy_(stored[name])
    optimizer.load_state_dict(state)


def read(path: Path) -> dict[str, Any]:
    """The plain content of a checkpoint; nothing in it can run. Raises SpardaError for a damaged file."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its unpickler and zip reader raise
        raise SpardaError(
            f"{path}: cannot be read ({type(error).__name__}); remove it to go on from an earlier one."
        ) from None
    values = content.get("model_state_dict") if isinstance(content, dict) else None
    if not isinstance(values, dict) or not all(isinstance(t, Tensor) for t in values.values()):
        raise SpardaError(f"{path}: is no checkpoint of a training; give a new --out.")
    return dict(content)


def check_same(path: Path, before: object, facts: Mapping[str, object]) -> None:
    """Refuse to go on from another training. Raises SpardaError naming what differs."""
    known = before if isinstance(before, dict) else {}
    # More steps of the same are no other training.
    other = [k for k in facts if k != "steps" and known.get(k) != facts[k]]
    if other:
        was = ", ".join(f"{k} {known.get(k)!r} then, {facts[k]!r} now" for k in other[:4])
        raise SpardaError(
            f"{path}: is of another training ({was}); give a new --out, or the arguments it was begun with."
        )
