"""A model's shape read from its Hugging Face ``config.json``. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparda.engine.errors import SpardaError
from sparda.engine.loader import read_json
from sparda.engine.rope import Rope, Scaling, rope_of
from sparda.engine.shapes import ModelShape

FAMILIES = ("llama", "minicpm", "mistral")
"""Values of ``model_type`` whose mathematics is the engine's."""

UNFIT = {
    "qwen2": "its Q, K and V projections have a bias",
    "qwen3": "it normalises the query and key of every head (qk-norm)",
    "mixtral": "its MLP is a mixture of experts",
}
"""Near relatives, each with what the engine does not compute."""

LEFT_OUT = {
    "qwen2": "the bias of Q, K and V is left out: the engine cannot run it",
    "qwen3": "the norm of every head's query and key is left out: the engine cannot run it",
}
"""Families that are planned as if they were llamas, each with what that leaves out."""

UNPLANNABLE = {
    **dict.fromkeys(
        ("mixtral", "qwen2_moe", "qwen3_moe", "minimax", "gpt_oss", "dbrx", "llama4", "olmoe", "granitemoe"),
        "its feed-forward is a mixture of experts, of which a step reads what its tokens choose: no kernel here does "
        "that, and no cost was measured",
    ),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm_moe_dsa", "minicpm3"),
        "its attention is latent (MLA): one compressed vector a token in place of keys and values for each KV head, so "
        "that there are no blocks of a KV head to choose",
    ),
    **dict.fromkeys(
        ("qwen3_next", "jamba", "falcon_h1", "bamba", "mamba", "mamba2", "rwkv", "recurrent_gemma", "zamba2"),
        "most of its layers keep a state of constant size in place of keys and values: there is next to nothing to "
        "offload",
    ),
    **dict.fromkeys(
        ("gemma2", "gemma3", "gemma3_text", "cohere2"),
        "most of its layers attend to a sliding window, whose keys and values are few: the method chooses blocks of a "
        "whole context",
    ),
}
"""Families whose mathematics is not the method's, each with the reason."""

HEAD_DIMS = (16, 32, 64, 128, 256)
"""Head sizes of the engine's kernels: powers of two."""

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")
_MUST_BE_OFF = {
    "attention_bias": "linears with a bias",
    "mlp_bias": "linears with a bias",
    "use_qk_norm": "norm of queries and keys",
    "qk_norm": "norm of queries and keys",
    "clip_qkv": "clipped projections",
    "attn_logit_softcapping": "capped attention logits",
    "final_logit_softcapping": "capped logits",
    "quantization_config": "quantised tensors",
    **dict.fromkeys(_EXPERTS, "mixture of experts"),
}


def shape_from_config(path: Path, *, value_bytes: int = 2) -> ModelShape:
    """The shape that a ``config.json``, or the one in the folder ``path``, states; it takes the folder's name.

    ``max_context`` is ``max_position_embeddings``. Weights, activations and cached values take ``value_bytes``.
    Raises SpardaError for a key that is missing or wrong, and for a model that the engine cannot compute, saying why.
    """
    file = config_file(path)
    name = file.resolve().parent.name or "model"
    return shape_of(read_json(file), name=name, where=str(file), value_bytes=value_bytes)


def config_file(path: Path) -> Path:
    """``path``, or the configuration in it where it is a folder."""
    return path / "config.json" if path.is_dir() else path


def planned_shape(path: Path) -> tuple[ModelShape, tuple[str, ...]]:
    """The shape to plan and simulate a model by, and what of it the plan leaves out, in sentences.

    Wider than ``shape_from_config``: what adds next to no bytes to a step (biases, the norm of queries and keys) is
    left out and said. Raises SpardaError, saying why, where the method itself does not fit the model.
    """
    file = config_file(path)
    table = read_json(file)
    where = str(file)
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    family = table.get("model_type")
    if family in UNPLANNABLE:
        raise SpardaError(f"{where}: model_type is {family!r}; {UNPLANNABLE[str(family)]}.")
    left_out = [LEFT_OUT[str(family)]] if family in LEFT_OUT else []
    left_out += [what for key, what in _PRICED_AT_NOTHING.items() if table.get(key)]
    plain = {k: v for k, v in table.items() if k not in _PRICED_AT_NOTHING}
    if family in LEFT_OUT:
        # As far as bytes go, these are llamas.
        plain["model_type"] = "llama"
    return shape_of(plain, name=name or "model", where=where), tuple(dict.fromkeys(left_out))


def tied_head(path: Path) -> bool | None:
    """Whether the configuration says that the output head is the embedding; None where it does not say."""
    value = read_json(config_file(path)).get("tie_word_embeddings")
    return value if isinstance(value, bool) else None


def shape_of(config: Mapping[str, object], *, name: str, where: str, value_bytes: int = 2) -> ModelShape:
    """``shape_from_config`` of a table that is already read; ``where`` begins every complaint."""
    c = _Config(config, where)
    family = c.family()
    c.refuse_what_differs()
    hidden, heads, context = (c.whole(k) for k in ("hidden_size", "num_attention_heads", "max_position_embeddings"))
    c.refuse_sliding_window(family, context)
    head_dim = c.head_dim(hidden, heads)
    # Mistral's own default is 8 KV heads, the other families' is one for each query head: a guess helps nobody there.
    kv_heads = c.whole("num_key_value_heads", None if family == "mistral" else heads)
    rope = c.rope(head_dim, context)
    mup = family == "minicpm"
    try:
        return ModelShape(
            name=name,
            layers=c.whole("num_hidden_layers"),
            d_model=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=c.whole("intermediate_size"),
            vocab=c.whole("vocab_size"),
            rope_theta=rope.theta,
            rope_factors=rope.factors,
            rope_amplitude=rope.amplitude,
            norm_eps=c.number("rms_norm_eps", 1e-6),
            max_context=context,
            scale_emb=c.number("scale_emb") if mup else 1.0,
            scale_depth=c.number("scale_depth") if mup else 0.0,
            dim_model_base=c.whole("dim_model_base") if mup else 0,
            value_bytes=value_bytes,
        )
    except SpardaError as error:
        raise error if str(error).startswith(where) else SpardaError(f"{where}: {error}") from None


_PRICED_AT_NOTHING = {
    "attention_bias": "the bias of the attention's linears is left out",
    "mlp_bias": "the bias of the feed-forward's linears is left out",
    "use_qk_norm": "the norm of every head's query and key is left out",
    "qk_norm": "the norm of every head's query and key is left out",
}
"""Keys whose work adds next to no bytes to a step."""


@dataclass(frozen=True, slots=True)
class _Config:
    table: Mapping[str, object]
    where: str

    def error(self, message: str) -> SpardaError:
        return SpardaError(f"{self.where}: {message}")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.table.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{key} is {_shown(value)}; a whole number from 1 up is wanted.")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.table.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(f"{key} is {_shown(value)}; a positive number is wanted.")
        return float(value)

    def family(self) -> str:
        family = self.table.get("model_type")
        if family in FAMILIES:
            return str(family)
        why = UNFIT.get(str(family), "the engine does not know its mathematics")
        raise self.error(f"model_type is {_shown(family)}; {why}. Known types: {', '.join(FAMILIES)}.")

    def refuse_what_differs(self) -> None:
        for key, what in _MUST_BE_OFF.items():
            if self.table.get(key):
                raise self.error(f"{key} is {_shown(self.table[key])}; the engine has no {what}; give another model.")
        act = self.table.get("hidden_act", "silu")
        if act not in ("silu", "swish"):
            raise self.error(f"hidden_act is {_shown(act)}; the engine's MLP is gated by silu; give another model.")

    def refuse_sliding_window(self, family: str, context: int) -> None:
        """A window as long as the longest context hides nothing; so does one that is switched off."""
        kinds = self.table.get("layer_types")
        if isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds):
            raise self.error("layer_types names other layers than full_attention; the engine has no other.")
        # A Mistral configuration that does not name its window has one of 4096 tokens.
        window = self.table.get("sliding_window", 4096 if family == "mistral" else None)
        off = window is None or self.table.get("use_sliding_window") is False
        if not off and (not isinstance(window, int) or window < context):
            raise self.error(
                f"sliding_window is {_shown(window)} with {context} positions; the engine's dense attention sees "
                "every token: give a model without a window (null)."
            )

    def head_dim(self, hidden: int, heads: int) -> int:
        if self.table.get("head_dim") is None and hidden % heads:
            raise self.error(f"hidden_size {hidden} is no multiple of {heads} num_attention_heads; state head_dim.")
        head_dim = self.whole("head_dim", hidden // heads)
        if head_dim not in HEAD_DIMS:
            raise self.error(f"head_dim is {head_dim}; the kernels take {', '.join(map(str, HEAD_DIMS))}.")
        return head_dim

    def rope(self, head_dim: int, context: int) -> Rope:
        """From the newer ``rope_parameters`` or the older ``rope_theta`` and ``rope_scaling``."""
        key = "rope_scaling" if self.table.get("rope_scaling") else "rope_parameters"
        given = self.table.get(key) or {}
        if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
            raise self.error(f"{key} is not one flat table; the engine rotates every layer alike.")
        partial = given.get("partial_rotary_factor", self.table.get("partial_rotary_factor"))
        if partial not in (None, 1):
            raise self.error(f"partial_rotary_factor is {_shown(partial)}; the engine rotates whole heads.")
        if given.get("mrope_section"):
            raise self.error("mrope_section is given; the engine has one position per token.")
        table = dict(given)
        # A length stated beside the table goes before the one in it, as in Phi-3's configurations.
        if self.table.get("original_max_position_embeddings") is not None:
            table["original_max_position_embeddings"] = self.table["original_max_position_embeddings"]
        theta = (_Config(table, self.where) if table.get("rope_theta") else self).number("rope_theta", 10000.0)
        return rope_of(Scaling(table, theta, head_dim, context, self.where))


def _shown(value: object) -> str:
    if value is None:
        return "missing"
    if isinstance(value, bool):
        return str(value).lower()
    return "a table" if isinstance(value, Mapping) else repr(value)
