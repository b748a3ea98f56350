"""Where there is no GPU, Triton's kernels run in its interpreter, whatever test imports them first."""

from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("torch") is not None:
    import torch

    # Triton reads this when a kernel is defined, so it must be set before any test imports one.
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
