"""What a GGUF file states and holds, through the gguf package. No torch here."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from sparda.engine.errors import SpardaError


class GgufFile:
    """An open file. Its tensors are mapped, not read, until they are asked for.

    Raises SpardaError where the gguf package is absent or the file is not a whole GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = _package()
        if not path.is_file():
            raise SpardaError(f"{path}: there is no such file; check the path.")
        try:
            self._reader = self._gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError, OSError, OverflowError) as error:
            raise SpardaError(f"{path}: not a whole GGUF file ({error}); fetch it anew.") from None
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = str(self.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the metadata: a number, a string, a truth value or a list of them."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def of_model(self, key: str, default: Any = None) -> Any:
        """``get`` of a key of the file's architecture: ``context_length`` is ``llama.context_length``."""
        return self.get(f"{self.architecture}.{key}", default)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by tensor name, rows first; a file states them the other way round."""
        return {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}

    def values(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor dequantised to fp32. Raises SpardaError for a type that the gguf package cannot undo."""
        tensor = self._tensors[name]
        try:
            found = self._gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise SpardaError(
                f"{self.path}: {name} is of type {tensor.tensor_type.name}, which the installed gguf package cannot "
                "dequantise; give a file of another quantisation."
            ) from None
        return np.array(found, dtype=np.float32)


def _package() -> ModuleType:
    try:
        import gguf
    except ModuleNotFoundError:
        raise SpardaError("reading GGUF needs a package that is not installed: pip install 'sparda[gguf]'.") from None
    return gguf
