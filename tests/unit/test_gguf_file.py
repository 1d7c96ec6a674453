"""The GGUF walk: a valid file is read, a broken one is one StartupError, fast and small (R60)."""

import struct
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gguf_files import ARRAY, RawGguf, RawTensor, scalar, string, strings, text
from triptych.services.runtime.gguf_file import TensorType, drop_handed, hand_down, open_gguf
from triptych.services.runtime.lifecycle import StartupError

HUGE = 1 << 63
TENSORS = (
    RawTensor("a", (4, 3), 0, np.arange(12, dtype=np.float32).tobytes()),
    RawTensor("b", (32, 2), 8, bytes(68)),
)
VALID = RawGguf(
    {
        "general.architecture": string("llama"),
        "n": scalar("u32", 7),
        "x": scalar("f32", 0.5),
        "yes": scalar("bool", 1),
        "words": strings(["", "é", "<0x-1>"]),
        "numbers": struct.pack("<IIQ3i", ARRAY, 5, 3, 1, -2, 3),
    },
    TENSORS,
)


def write(path: Path, file: RawGguf | bytes) -> Path:
    path.write_bytes(file if isinstance(file, bytes) else file.write())
    return path


def test_a_valid_file(tmp_path: Path) -> None:
    file = open_gguf(write(tmp_path / "m.gguf", VALID))
    assert file.text("general.architecture") == "llama"
    assert file.integer("n") == 7
    assert file.number("x") == 0.5
    assert file.number("n") == 7.0
    assert file.metadata["yes"] is True
    assert file.metadata["words"] == ["", "é", "<0x-1>"]
    assert file.metadata["numbers"] == [1, -2, 3]
    assert file.integer("absent") is None
    a, b = file.tensors["a"], file.tensors["b"]
    assert (a.shape, a.type, a.num_bytes) == ((3, 4), TensorType.F32, 48)
    assert (b.shape, b.type, b.num_bytes) == ((2, 32), TensorType.Q8_0, 68)
    values = np.frombuffer(file.data, np.float32, 12, a.offset)
    assert values.tolist() == list(range(12))


def test_another_alignment(tmp_path: Path) -> None:
    metadata = {**VALID.metadata, "general.alignment": scalar("u32", 64)}
    file = open_gguf(write(tmp_path / "m.gguf", replace(VALID, metadata=metadata, alignment=64)))
    assert file.tensors["b"].offset % 64 == 0


@pytest.mark.parametrize("method", ["text", "integer", "number"])
def test_a_value_of_another_type(method: str, tmp_path: Path) -> None:
    file = open_gguf(write(tmp_path / "m.gguf", VALID))
    with pytest.raises(StartupError, match="words is not"):
        getattr(file, method)("words")
    with pytest.raises(StartupError, match="yes is not"):
        getattr(file, method)("yes")


def meta(**values: bytes) -> RawGguf:
    return replace(VALID, metadata={**VALID.metadata, **values})


def tensor(**changes: object) -> RawGguf:
    return replace(VALID, tensors=(replace(TENSORS[0], **changes), TENSORS[1]))  # type: ignore[arg-type] # any field


BROKEN: dict[str, tuple[RawGguf | bytes, str]] = {
    "empty": (b"", "no header"),
    "another format": (replace(VALID, magic=b"PK\3\4"), "not a GGUF file"),
    "version 1": (replace(VALID, version=1), "version 1 "),
    "big-endian": (replace(VALID, version=3 << 24), "version"),
    "tensors": (replace(VALID, num_tensors=HUGE), "tensors, more than"),
    "keys": (replace(VALID, num_keys=HUGE), "keys, more than"),
    "one tensor too many": (replace(VALID, num_tensors=3), "tensor|end of the file"),
    "string": (meta(s=string("x", HUGE)), "passes the end"),
    "string of 2^64 - 1": (meta(s=string("x", 2**64 - 1)), "passes the end"),
    "strings": (meta(s=strings(["x"], HUGE)), "passes the end"),
    "strings within the file": (meta(s=strings(["x"], 20)), "passes the end|is not UTF-8"),
    "array": (meta(s=struct.pack("<IIQ", ARRAY, 10, HUGE)), "passes the end"),
    "array that wraps": (meta(s=struct.pack("<IIQ", ARRAY, 10, 1 << 61)), "passes the end"),
    "array of arrays": (meta(s=struct.pack("<IIQ", ARRAY, ARRAY, 1)), "unsupported type 9"),
    "array of nothing": (meta(s=struct.pack("<IIQ", ARRAY, 99, 1)), "unsupported type 99"),
    "value type": (meta(s=struct.pack("<I", 77)), "unknown type 77"),
    "not UTF-8": (meta(s=string(b"\xff\xfe")), "not UTF-8"),
    "no dimensions": (tensor(num_dims=0), "0 dimensions"),
    "nine dimensions": (tensor(num_dims=9), "9 dimensions"),
    "dimension 0": (tensor(dims=(4, 0)), "dimensions"),
    "dimensions that wrap": (tensor(dims=(1 << 32, 1 << 32)), "ends at byte"),
    "dimensions that wrap to the size": (tensor(dims=(4, 3 + (1 << 62))), "ends at byte"),
    "dimension 2^63": (tensor(dims=(HUGE, 1)), "ends at byte"),
    "half a block": (tensor(dims=(16, 3), kind=8), "dimensions"),
    "unsupported type": (tensor(kind=10), "type Q2_K, which is not supported"),
    "unknown type": (tensor(kind=4), "type number 4"),
    "offset past the end": (tensor(offset=1 << 40), "ends at byte"),
    "offset 2^64 - 32": (tensor(offset=2**64 - 32), "ends at byte"),
    "offset unaligned": (tensor(offset=4), "not a multiple of 32"),
    "tensor twice": (tensor(name="b"), "b occurs twice"),
    **{
        f"alignment {value}": (meta(**{"general.alignment": scalar("u32", value)}), "alignment")
        for value in (0, 1, 3, 33, 1 << 31)
    },
    "alignment as text": (meta(**{"general.alignment": string("32")}), "alignment"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    path = write(tmp_path / "m.gguf", content)
    tracemalloc.start()
    began = time.thread_time()
    with pytest.raises(StartupError, match=message) as caught:
        open_gguf(path)
    assert time.thread_time() - began < 1
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_string_beyond_the_end_of_a_large_file_is_not_copied(tmp_path: Path) -> None:
    """Only as much as is there could be; that may be gigabytes of weights."""
    words = struct.pack("<IIQ", ARRAY, 8, 2) + text("a") + text("", length=1 << 40)
    path = write(tmp_path / "m.gguf", meta(words=words))
    with path.open("r+b") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    with pytest.raises(StartupError, match="words passes the end of the file"):
        open_gguf(path)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_a_key_twice(tmp_path: Path) -> None:
    raw = VALID.write().replace(text("x"), text("n"), 1)
    with pytest.raises(StartupError, match="key n occurs twice"):
        open_gguf(write(tmp_path / "m.gguf", raw))


def test_cut_at_every_byte(tmp_path: Path) -> None:
    raw = VALID.write()
    end = len(raw) - 28  # padding behind the last tensor may be absent
    path = tmp_path / "m.gguf"
    for size in range(end):
        path.write_bytes(raw[:size])
        with pytest.raises(StartupError):
            open_gguf(path)
    path.write_bytes(raw[:end])
    open_gguf(path)


def test_random_changes_never_escape(tmp_path: Path) -> None:
    """One byte changed: the file is read or refused, nothing else."""
    raw = VALID.write()
    header = len(raw) - 64 - 96
    random = np.random.default_rng(0)
    path = tmp_path / "m.gguf"
    for _ in range(500):
        changed = bytearray(raw)
        changed[int(random.integers(header))] = int(random.integers(256))
        path.write_bytes(changed)
        try:
            file = open_gguf(path)
        except StartupError:
            continue
        for each in file.tensors.values():
            assert 0 <= each.offset <= each.offset + each.num_bytes <= len(raw)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        open_gguf(tmp_path / "absent.gguf")


def test_a_file_that_is_handed_down_is_taken_once(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", meta(s=string("x")))
    file = open_gguf(path)
    hand_down(file)
    assert open_gguf(path) is file
    assert open_gguf(path) is not file
    hand_down(file)
    drop_handed()
    assert open_gguf(path) is not file


def test_a_file_that_has_changed_is_read_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", meta(s=string("x")))
    hand_down(open_gguf(path))
    write(tmp_path / "other", meta(s=string("y"))).replace(path)
    assert open_gguf(path).text("s") == "y"
    hand_down(open_gguf(path))
    path.unlink()
    with pytest.raises(StartupError, match="No such file"):
        open_gguf(path)


def test_another_file_is_not_taken(tmp_path: Path) -> None:
    hand_down(open_gguf(write(tmp_path / "a.gguf", meta(s=string("a")))))
    assert open_gguf(write(tmp_path / "b.gguf", meta(s=string("b")))).text("s") == "b"
    drop_handed()
