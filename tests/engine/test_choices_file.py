"""Files of choices: read back exactly, small, written whole, and told apart when they are not what they should be."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from sparda.engine.dynamics.choices import Choices
from sparda.engine.dynamics.choices_code import DEPTH
from sparda.engine.dynamics.choices_file import MAGIC, pack, read_choices, unpack, write_choices
from sparda.engine.dynamics.overlap import reuse
from sparda.engine.errors import SpardaError
from tests.engine.made_choices import any_choices, drifting


def same(a: Choices, b: Choices) -> bool:
    return a.facts == b.facts and a.blocks.dtype == b.blocks.dtype and np.array_equal(a.blocks, b.blocks)


@given(any_choices())
def test_whatever_is_packed_comes_back(choices: Choices) -> None:
    assert same(unpack(pack(choices), "here"), choices)


def test_blocks_too_far_down_the_stack_are_named_by_their_id(tmp_path: Path) -> None:
    facts = drifting(1, top_k=4, layers=(0,), kv_heads=1, context_tokens=(16 * (3 * DEPTH),)).facts
    ids = np.arange(2 * DEPTH, dtype=np.int16)
    # One after the other, and then the first, which many have pushed out of the stack, again.
    blocks = np.stack([ids, np.full_like(ids, 3 * DEPTH)], axis=1)
    blocks = np.concatenate([blocks, blocks[:1]])
    blocks = np.concatenate([blocks, np.full_like(blocks, -1)], axis=1)[:, None, None]
    choices = Choices(facts, blocks)
    write_choices(tmp_path / "long.choices", choices)
    assert same(read_choices(tmp_path / "long.choices"), choices)


def test_a_set_of_16_blocks_takes_at_most_3_bytes_where_a_fifth_turns_over(tmp_path: Path) -> None:
    choices = drifting(
        1024, keep=0.997, noise=0.17, block=64, top_k=16, layers=tuple(range(5)), kv_heads=3, context_tokens=(6144,)
    )
    assert 0.78 < reuse(choices).mean() < 0.83
    size = write_choices(tmp_path / "a.choices", choices)
    assert size == (tmp_path / "a.choices").stat().st_size
    assert size / (choices.steps * choices.facts.streams) <= 3.0
    assert same(read_choices(tmp_path / "a.choices"), choices)
    assert [f.name for f in tmp_path.iterdir()] == ["a.choices"]


def refused(data: bytes) -> str:
    with pytest.raises(SpardaError) as found:
        unpack(data, "x.choices")
    assert str(found.value).startswith("x.choices: ")
    return str(found.value)


@pytest.fixture(scope="module")
def packed() -> bytes:
    return pack(drifting(12))


def test_a_file_cut_anywhere_says_that_it_is_cut(packed: bytes) -> None:
    for length in [*range(1, len(MAGIC) + 9), len(packed) // 2, len(packed) - 1]:
        assert "is cut short" in refused(packed[:length]), length


def test_a_changed_byte_is_noticed_wherever_it_is(packed: bytes) -> None:
    for at in range(len(MAGIC) + 4, len(packed), 7):
        changed = bytearray(packed)
        changed[at] ^= 1
        assert "is damaged" in refused(bytes(changed)), at
    assert "is damaged" in refused(packed + b"\0")


def test_another_file_is_told_so() -> None:
    for data in (b"", b"{}", b"\x89PNG\r\n", b"sparda chess\n"):
        assert "is no file of choices" in refused(data)


def test_a_newer_file_is_told_so(packed: bytes) -> None:
    start = len(MAGIC) + 8
    length = int.from_bytes(packed[start - 8 : start - 4], "little")
    header = json.loads(packed[start : start + length])
    text = json.dumps({**header, "version": 2, "colour": "blue"}).encode()
    words = len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little")
    assert "version 2 of the format and this program reads version 1" in refused(MAGIC + words + text)


def test_contents_that_no_choices_have_are_refused(packed: bytes) -> None:
    start = len(MAGIC) + 8
    length = int.from_bytes(packed[start - 8 : start - 4], "little")
    header = json.loads(packed[start : start + length])
    for change in ({"steps": 11}, {"steps": 13}, {"room": 3}, {"planes": header["planes"][1:]}):
        text = json.dumps({**header, **change}).encode()
        words = len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little")
        assert "is damaged" in refused(MAGIC + words + text + packed[start + length :])


def test_a_file_that_is_not_there_and_a_folder_that_is_not_there_are_said(tmp_path: Path) -> None:
    with pytest.raises(SpardaError, match="there is no such file"):
        read_choices(tmp_path / "none.choices")
    with pytest.raises(SpardaError, match="cannot be read"):
        read_choices(tmp_path)
    with pytest.raises(SpardaError, match="cannot be written"):
        write_choices(tmp_path / "none" / "a.choices", drifting(2))
    assert not list(tmp_path.iterdir())
