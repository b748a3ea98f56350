"""GGUF files of the Llama architecture, dequantised into ``Weights``."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sparda.engine.checkpoint import EMBED, FINAL_NORM, HEAD, assemble, checked_forecast, wanted_tensors
from sparda.engine.errors import SpardaError
from sparda.engine.gguf_reader import GgufFile
from sparda.engine.model_config import shape_of
from sparda.engine.shapes import ModelShape
from sparda.engine.tensor_file import Header, check_headers
from sparda.engine.weights import Weights

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the frequencies, written where a model scales them by wavelength (Llama 3.1)."""

_WHOLE = {EMBED: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SCALES = ("embedding_scale", "residual_scale", "logit_scale", "attention.scale")
"""Metadata of other models of the family, which the Llama architecture has no use for."""


def load_gguf(
    path: Path,
    *,
    device: torch.device | str,
    value_bytes: int = 2,
    forecast: Path | None = None,
    lookahead: int = 1,
) -> Weights:
    """The model of a GGUF file, each tensor dequantised to fp32 and then converted to ``value_bytes``.

    Shape and rope come from the metadata; the head is the embedding where there is no ``output.weight``.
    ``forecast``: a file or folder for ``read_forecast``, which must serve ``lookahead``. Raises SpardaError for another
    architecture, for what ``shape_of`` refuses, and for tensors that are missing, unknown or misshapen, naming them,
    before anything is allocated.
    """
    file = GgufFile(path)
    shape = _shape(file, value_bytes)
    held = file.shapes
    wanted = wanted_tensors(shape, tied=_WHOLE[HEAD] not in held, eviction=False)
    names = {name: gguf_name(name) for name in wanted}
    headers = {name: Header(size, "F32", path) for name, size in held.items()}
    check_headers(headers, {names[n]: size for n, size in wanted.items()}, [ROPE_FACTORS], str(path))

    def read(name: str) -> Tensor:
        rows = torch.from_numpy(file.values(names[name]))
        if name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight")):
            return unpermuted(rows, shape.head_dim)
        return rows

    own = checked_forecast(forecast, shape, lookahead)
    return assemble(shape, read, device=device, wanted=wanted, forecast=own)


def gguf_name(name: str) -> str:
    """The name in a GGUF file of a tensor named as Hugging Face does."""
    if name in _WHOLE:
        return _WHOLE[name]
    layer, module = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{_LAYER[module]}.weight"


def unpermuted(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of a Q or K projection [heads * head_dim, columns] in the order that rotates pair (i, i + head_dim / 2).

    GGUF files hold each head's rows with a pair side by side, as llama.cpp rotates them.
    """
    return rows.view(-1, head_dim // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _shape(file: GgufFile, value_bytes: int) -> ModelShape:
    """The metadata as a configuration, read like any other."""
    if file.architecture != "llama":
        raise SpardaError(f"{file.path}: architecture is {file.architecture!r}; of GGUF files only 'llama' is read.")
    of = file.of_model
    scales = [k for k in _SCALES if of(k) not in (None, 0.0, 1.0)]
    if scales:
        raise SpardaError(f"{file.path}: {scales[0]} is {of(scales[0])}; the Llama architecture has no such scale.")
    hidden, heads = of("embedding_length"), of("attention.head_count")
    head_dim = of("attention.key_length")
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads:
        head_dim = hidden // heads
    if of("attention.value_length", head_dim) != head_dim:
        raise SpardaError(f"{file.path}: keys and values differ in length; the engine has one head_dim for both.")
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": head_dim,
        "intermediate_size": of("feed_forward_length"),
        "vocab_size": file.shapes.get(_WHOLE[EMBED], (None,))[0],
        "max_position_embeddings": of("context_length"),
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
        "rope_theta": of("rope.freq_base"),
        "rope_scaling": _scaling(file),
        "sliding_window": of("attention.sliding_window"),
        "num_experts": of("expert_count"),
        "partial_rotary_factor": of("rope.dimension_count", head_dim) / head_dim if head_dim else None,
    }
    shape = shape_of(config, name=file.path.stem, where=str(file.path), value_bytes=value_bytes)
    if ROPE_FACTORS not in file.shapes:
        return shape
    factors = [float(f) for f in file.values(ROPE_FACTORS).ravel()]
    if len(factors) != shape.head_dim // 2 or not all(0 < f < math.inf for f in factors):
        raise SpardaError(f"{file.path}: {ROPE_FACTORS} are not {shape.head_dim // 2} positive numbers; fetch it anew.")
    scaled = shape.rope_factors or (1.0,) * len(factors)
    return replace(shape, rope_factors=tuple(f * s for f, s in zip(factors, scaled, strict=True)))


def _scaling(file: GgufFile) -> dict[str, object]:
    kind = file.of_model("rope.scaling.type", "none")
    return {
        "rope_type": "default" if kind == "none" else kind,
        "factor": file.of_model("rope.scaling.factor"),
        "original_max_position_embeddings": file.of_model("rope.scaling.original_context_length"),
    }
