"""Plain tables (TOML, JSON) to frozen dataclasses and back, strictly; and files that are whole or not there."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import os
import secrets
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast

from sparda.engine.errors import SpardaError

T = TypeVar("T")

_SCALARS: dict[object, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a finite number",
    str: "a string",
    type(None): "null",
}


def read(cls: type[T], data: Mapping[str, object], *, where: str) -> T:
    """The dataclass ``cls`` made of ``data``; ``where`` (a file, a section) begins every complaint.

    An integer is taken for a float; nothing else is converted. Raises SpardaError for an unknown key, a missing
    one, a value of another type, and for whatever the dataclass itself refuses.
    """
    return cast(T, _table(cls, data, where, ""))


def to_plain(obj: object) -> dict[str, object]:
    """The inverse of ``read``: nested dictionaries, lists and scalars, fit for JSON."""
    if not dataclasses.is_dataclass(obj) or isinstance(obj, type):
        raise TypeError(f"to_plain wants a dataclass instance, not {type(obj).__name__}")
    return {f.name: _plain(getattr(obj, f.name)) for f in dataclasses.fields(obj) if f.init}


def read_toml(path: str | Path) -> dict[str, object]:
    """The tables of a TOML file. Raises SpardaError where it is missing or is not TOML."""
    return _parse(path, "TOML", tomllib.loads)


def read_json(path: str | Path) -> dict[str, object]:
    """The object in a JSON file; a key given twice is refused. Raises SpardaError like ``read_toml``."""
    return _parse(path, "JSON", lambda text: json.loads(text, object_pairs_hook=_once))


def write_json(path: str | Path, obj: object) -> None:
    """Write a dataclass or plain data as JSON, whole or not at all."""
    try:
        text = json.dumps(_plain(obj), indent=2, allow_nan=False)
    except ValueError as error:
        raise SpardaError(f"{path}: not written, a value has no place in JSON ({error}); mend the value.") from None
    write_text(path, text + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` as UTF-8, whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write ``data`` under a temporary name in the same folder, then rename: readers see all of it or none.

    Raises SpardaError where the system refuses.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise SpardaError(
            f"{target}: cannot be written ({error.strerror}); give a path in an existing folder that you may write to."
        ) from None


def _parse(path: str | Path, format_name: str, parse: Callable[[str], object]) -> dict[str, object]:
    try:
        data = parse(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpardaError(f"{path}: there is no such file; check the path.") from None
    except OSError as error:
        raise SpardaError(f"{path}: cannot be read ({error.strerror}); give a file that you may read.") from None
    except (ValueError, RecursionError) as error:
        raise SpardaError(f"{path}: not valid {format_name} ({error}); mend the file or write it anew.") from None
    if not isinstance(data, dict):
        raise SpardaError(f"{path}: holds {_shown(data)}; a table of keys and values is wanted at the top.")
    return data


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} is given twice")
    return table


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value):
        return to_plain(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no plain form")


def _table(cls: Any, data: object, where: str, key: str) -> object:
    """``data`` as an instance of the dataclass ``cls``; ``key`` is its dotted place under ``where``."""
    if not isinstance(data, Mapping):
        raise _wrong(where, key, data, "a table")
    fields = [f for f in dataclasses.fields(cls) if f.init]
    names = [f.name for f in fields]
    unknown = next((k for k in data if k not in names), None)
    if unknown is not None:
        near = difflib.get_close_matches(str(unknown), names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        allowed = ", ".join(names) if names else "none"
        raise SpardaError(f"{where}: unknown key {_dotted(key, str(unknown))!r}; {hint}Allowed keys: {allowed}.")
    for field in fields:
        if field.name not in data and _required(field):
            raise SpardaError(
                f"{where}: key {_dotted(key, field.name)!r} is missing; {_wanted(_hints(cls)[field.name])} is wanted."
            )
    values = {
        f.name: _value(_hints(cls)[f.name], data[f.name], where, _dotted(key, f.name)) for f in fields if f.name in data
    }
    try:
        return cls(**values)
    except SpardaError as error:
        place = f"{where}: {key}" if key else where
        raise SpardaError(f"{place}: {error}") from None


def _value(hint: Any, value: object, where: str, key: str) -> object:
    """``value`` checked against the type ``hint``, nested tables and lists made into their types."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is object or hint is Any:
        return value
    if hint in _SCALARS:
        return _scalar(hint, value, where, key)
    if dataclasses.is_dataclass(hint):
        return _table(hint, value, where, key)
    if origin is Literal:
        for allowed in args:
            if type(allowed) is type(value) and allowed == value:
                return value
        raise _wrong(where, key, value, _wanted(hint))
    if origin in (Union, types.UnionType):
        return _union(hint, args, value, where, key)
    if origin in (tuple, list, Sequence):
        return _items(hint, origin, args, value, where, key)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _wrong(where, key, value, _wanted(hint))
        return {str(k): _value(args[1], v, where, _dotted(key, str(k))) for k, v in value.items()}
    raise TypeError(f"{key}: the loader cannot read {hint!r}")


def _scalar(hint: Any, value: object, where: str, key: str) -> object:
    if hint is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and math.isfinite(as_float := _float(cast(float, value))):
            return as_float
    elif type(value) is hint:
        return value
    raise _wrong(where, key, value, _wanted(hint))


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _union(hint: Any, members: tuple[Any, ...], value: object, where: str, key: str) -> object:
    if value is None and type(None) in members:
        return None
    some = [m for m in members if m is not type(None)]
    if len(some) == 1 and value is not None and dataclasses.is_dataclass(some[0]):
        return _value(some[0], value, where, key)
    if type(value) in some:
        return value if type(value) is not float else _scalar(float, value, where, key)
    for member in some:
        try:
            return _value(member, value, where, key)
        except SpardaError:
            continue
    raise _wrong(where, key, value, _wanted(hint))


def _items(hint: Any, origin: Any, args: tuple[Any, ...], value: object, where: str, key: str) -> object:
    if not isinstance(value, list | tuple):
        raise _wrong(where, key, value, _wanted(hint))
    if origin is tuple and args[-1:] != (Ellipsis,):
        if len(value) != len(args):
            raise _wrong(where, key, value, _wanted(hint))
        hints: Sequence[Any] = args
    else:
        hints = [args[0]] * len(value)
    items = [_value(h, v, where, f"{key}[{i}]") for i, (h, v) in enumerate(zip(hints, value, strict=True))]
    return items if origin is list else tuple(items)


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _dotted(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _wrong(where: str, key: str, value: object, wanted: str) -> SpardaError:
    place = f"key {key!r}" if key else "the whole"
    return SpardaError(f"{where}: {place} is {_shown(value)}; {wanted} is wanted.")


def _shown(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a table"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _wanted(hint: Any) -> str:
    """A type in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if origin is Literal:
        return "one of " + ", ".join(_shown(a) for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_wanted(a) for a in args)
    if origin is tuple and args[-1:] != (Ellipsis,):
        return f"a list of {len(args)} ({', '.join(_wanted(a) for a in args)})"
    if origin in (tuple, list, Sequence):
        return f"a list, each {_wanted(args[0])},"
    return "a table"
