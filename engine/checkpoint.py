"""Checkpoints in Hugging Face's form (``config.json`` and safetensors) read into ``Weights``, and written from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from sparda.engine.errors import SpardaError
from sparda.engine.forecast_file import NAMES, Forecast, forecast_of, read_forecast, tensor_name
from sparda.engine.loader import read_json, write_json
from sparda.engine.model_config import shape_from_config, tied_head
from sparda.engine.shapes import ModelShape
from sparda.engine.tensor_file import TensorFiles, check_headers, replacing, write_tensors
from sparda.engine.weights import DTYPES, LayerWeights, Weights

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBED, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

HARMLESS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Ends of names that old checkpoints hold and the configuration states anyway."""

EVICTION = ("self_attn.A", "self_attn.delta.weight")
"""NOSA's eviction head, in the order of ``LayerWeights.eviction``."""


def load_checkpoint(
    folder: Path,
    *,
    device: torch.device | str,
    value_bytes: int = 2,
    forecast: Path | None = None,
    lookahead: int = 1,
) -> Weights:
    """The model in a folder, its values converted to ``value_bytes`` and its muP scales folded in.

    Reads ``model.safetensors`` or the shards of its index. The head is ``lm_head``, or the embedding where the
    configuration ties them or the file has no head and the configuration does not ask for one. ``forecast``: a file
    or folder for ``read_forecast``, which must serve ``lookahead``; without it, selection rows that the checkpoint
    itself holds are taken. Every name and shape is checked before anything is allocated.

    Raises SpardaError for a model that the engine cannot compute and for tensors that are missing, unknown or
    misshapen, naming them.
    """
    shape = shape_from_config(folder, value_bytes=value_bytes)
    files = TensorFiles(_files_of(folder))
    names = files.headers
    tied = tied_head(folder)
    tied = HEAD not in names if tied is None else tied
    own = {i: [q for q in NAMES if tensor_name(q, i) in names] for i in range(shape.layers)}
    wanted = wanted_tensors(shape, tied=tied, eviction=any(n.endswith(EVICTION) for n in names))
    wanted |= {tensor_name(q, i): (shape.kv_width, shape.d_model) for i, queries in own.items() for q in queries}
    harmless = [n for n in names if n.endswith(HARMLESS) or (tied and n == HEAD)]
    check_headers(names, wanted, harmless, str(folder))
    return assemble(
        shape, files.read, device=device, wanted=wanted, forecast=checked_forecast(forecast, shape, lookahead)
    )


def _files_of(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint."""
    index = folder / INDEX
    if not index.is_file():
        if (folder / SINGLE).is_file():
            return [folder / SINGLE]
        raise SpardaError(
            f"{folder}: holds neither {SINGLE} nor {INDEX}; other forms (pytorch_model.bin) are not read: "
            "convert the checkpoint to safetensors."
        )
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, Mapping) or not shards:
        raise SpardaError(f"{index}: has no weight_map from tensors to files; fetch it anew.")
    for shard in shards.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise SpardaError(f"{index}: names {shard!r}, which is no file of that folder; fetch it anew.")
    return [folder / shard for shard in sorted(set(shards.values()))]


def checked_forecast(path: Path | None, shape: ModelShape, lookahead: int) -> Forecast | None:
    """The Forecast of a file or folder, None where none is given. Raises SpardaError where it is not the model's."""
    if path is None:
        return None
    forecast = read_forecast(path)
    forecast.check_fits(shape, lookahead)
    return forecast


def wanted_tensors(shape: ModelShape, *, tied: bool, eviction: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors; no head where it is ``tied``."""
    d, s = shape.d_model, shape
    wanted: dict[str, tuple[int, ...]] = {EMBED: (s.vocab, d), FINAL_NORM: (d,)}
    if not tied:
        wanted[HEAD] = (s.vocab, d)
    for i in range(s.layers):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (d,),
            "self_attn.q_proj.weight": (s.q_width, d),
            "self_attn.k_proj.weight": (s.kv_width, d),
            "self_attn.v_proj.weight": (s.kv_width, d),
            "self_attn.o_proj.weight": (d, s.q_width),
            "post_attention_layernorm.weight": (d,),
            "mlp.gate_proj.weight": (s.ffn, d),
            "mlp.up_proj.weight": (s.ffn, d),
            "mlp.down_proj.weight": (d, s.ffn),
        }
        if eviction:
            layer |= dict(zip(EVICTION, ((s.kv_heads,), (s.kv_heads, s.kv_width)), strict=True))
        wanted |= {f"model.layers.{i}.{name}": size for name, size in layer.items()}
    return wanted


def assemble(
    shape: ModelShape,
    read: Callable[[str], Tensor],
    *,
    device: torch.device | str,
    wanted: Mapping[str, tuple[int, ...]],
    forecast: Forecast | None = None,
) -> Weights:
    """``Weights`` of the tensors that ``read`` returns for the names of ``wanted``, one at a time.

    The residual branches' scale goes into ``o_proj`` and ``down_proj``, that of the embedding into its rows, that of
    the logits into the final norm; a tied head is the embedding as it is stored. Selection rows come from
    ``forecast``, else from ``wanted``.
    """
    dtype = DTYPES[shape.value_bytes]

    def value(name: str, scale: float = 1.0) -> Tensor:
        # A copy in any case: what is read may be a view of the mapped file.
        out = torch.empty(wanted[name], dtype=dtype, device=device)
        tensor = read(name)
        return out.copy_(tensor if scale == 1.0 else tensor.to(device).float() * scale)

    def stacked(names: list[str], more: Mapping[str, Tensor]) -> Tensor:
        rows = sum(wanted[n][0] for n in names) + sum(len(t) for t in more.values())
        out = torch.empty(rows, shape.d_model, dtype=dtype, device=device)
        start = 0
        for tensor in chain(map(read, names), more.values()):
            out[start : start + len(tensor)].copy_(tensor)
            start += len(tensor)
        return out

    def layer(i: int) -> LayerWeights:
        prefix = f"model.layers.{i}."
        rows = forecast.of_layer(i) if forecast else {q: read(n) for q in NAMES if (n := tensor_name(q, i)) in wanted}
        first, second = (prefix + name for name in EVICTION)
        return LayerWeights(
            norm=value(prefix + "input_layernorm.weight"),
            fused=stacked([f"{prefix}self_attn.{p}_proj.weight" for p in "qkv"], rows),
            output=value(prefix + "self_attn.o_proj.weight", shape.residual_scale),
            ffn_norm=value(prefix + "post_attention_layernorm.weight"),
            gate_up=stacked([f"{prefix}mlp.{p}_proj.weight" for p in ("gate", "up")], {}),
            down=value(prefix + "mlp.down_proj.weight", shape.residual_scale),
            selection=tuple(rows),
            eviction=(read(first).float().to(device), read(second).float().to(device)) if first in wanted else None,
        )

    embed = value(EMBED, shape.scale_emb)
    layers = tuple(layer(i) for i in range(shape.layers))
    final_norm = value(FINAL_NORM, shape.logit_scale)
    if HEAD in wanted:
        head = value(HEAD)
    else:
        head = embed if shape.scale_emb == 1.0 else value(EMBED)
    return Weights(shape, embed, layers, final_norm, head)


def write_checkpoint(folder: Path, weights: Weights) -> None:
    """Write a model as a Llama checkpoint: a new folder with ``config.json`` and one safetensors file, or nothing.

    muP scales are in the weights by now, so the configuration has none: reading it back gives the same tensors.
    Selection rows and NOSA's eviction head go into the same file under their public names. Raises SpardaError where
    the folder holds files already or cannot be written.
    """
    tied = weights.head.data_ptr() == weights.embed.data_ptr()
    with replacing(folder) as temporary:
        temporary.mkdir()
        write_json(temporary / "config.json", _config_of(weights.shape, tied))
        write_tensors(temporary / SINGLE, _tensors_of(weights, tied), {"format": "pt"})


def _config_of(s: ModelShape, tied: bool) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": s.d_model,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.ffn,
        "vocab_size": s.vocab,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": s.norm_eps,
        "max_position_embeddings": s.max_context,
        "rope_theta": s.rope_theta,
        "tie_word_embeddings": tied,
        "torch_dtype": str(DTYPES[s.value_bytes]).removeprefix("torch."),
    }
    if s.rope_factors or s.rope_amplitude != 1.0:
        factors = list(s.rope_factors or (1.0,) * (s.head_dim // 2))
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": factors,
            "short_factor": factors,
            "original_max_position_embeddings": s.max_context,
            "attention_factor": s.rope_amplitude,
        }
    return config


def _tensors_of(weights: Weights, tied: bool) -> dict[str, Tensor]:
    """Every tensor by its public name, as views of the weights."""
    s, forecast = weights.shape, forecast_of(weights)
    tensors = {EMBED: weights.embed, FINAL_NORM: weights.final_norm}
    if not tied:
        tensors[HEAD] = weights.head
    for i, w in enumerate(weights.layers):
        q, k, v = w.fused[: s.q_width + 2 * s.kv_width].split([s.q_width, s.kv_width, s.kv_width])
        gate, up = w.gate_up.chunk(2)
        layer = {
            "input_layernorm.weight": w.norm,
            "self_attn.q_proj.weight": q,
            "self_attn.k_proj.weight": k,
            "self_attn.v_proj.weight": v,
            "self_attn.o_proj.weight": w.output,
            "post_attention_layernorm.weight": w.ffn_norm,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": w.down,
        }
        if w.eviction is not None:
            layer |= dict(zip(EVICTION, w.eviction, strict=True))
        tensors |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
        tensors |= {tensor_name(query, i): rows for query, rows in forecast.of_layer(i).items()}
    return tensors
