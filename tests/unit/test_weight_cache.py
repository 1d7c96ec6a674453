"""Packed weights and their cache: what is used, what is refused, and what a start may hold."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from quantized_folders import SIZES, Scheme, write_quantized
from tiny_models import save, tiny_model, write_gguf
from triptych.kernels.cpu import checksum
from triptych.services.executor import weight_cache
from triptych.services.executor.packed_weights import Place, pack_weights, parts_of, places_of
from triptych.services.executor.raw_weights import RawWeights, open_raw_weights
from triptych.services.executor.rounding import RoundedWeights, Rounding
from triptych.services.executor.weight_cache import packed_memory
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import ModelFiles, resolve_model

Memory = NDArray[np.uint8]


@pytest.fixture(autouse=True)
def _small_models_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache, "SMALLEST_BYTES", 0)


class Model:
    """A model file, and how often its weights were packed."""

    def __init__(self, path: Path) -> None:
        self.files: ModelFiles = resolve_model(str(path))
        self.source: RawWeights = open_raw_weights(self.files)
        self.places: list[Place] = places_of(parts_of(self.source.config), self.source)
        self.packed = 0

    def memory(self, folder: Path | None) -> Memory:
        def pack(to: Memory) -> None:
            self.packed += 1
            pack_weights(self.places, self.source, to, 2, lambda done, total: None)

        before = self.packed
        memory, cached = packed_memory(folder, self.files, self.places, pack)
        assert cached == (self.packed == before)
        return memory.copy()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama", {}), path, type_of=lambda name: "F16")
    return path


def test_a_second_start_maps_what_the_first_packed(path: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "deeper"
    first, second, without = Model(path), Model(path), Model(path)
    packed = first.memory(cache)
    assert first.packed == 1
    assert [entry.suffix for entry in cache.iterdir()] == [".packed"]
    assert cache.stat().st_mode & 0o777 == 0o700
    np.testing.assert_array_equal(second.memory(cache), packed)
    assert second.packed == 0
    np.testing.assert_array_equal(without.memory(None), packed)
    assert without.packed == 1


def _flip(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "magic": lambda file: _flip(file, 0),
    "key": lambda file: _flip(file, 20),
    "first weight": lambda file: _flip(file, 4096),
    "last weight": lambda file: _flip(file, file.stat().st_size - 1),
    "cut": lambda file: os.truncate(file, file.stat().st_size - 64),
    "longer": lambda file: os.truncate(file, file.stat().st_size + 64),
    "empty": lambda file: os.truncate(file, 0),
    "foreign": lambda file: file.write_bytes(b"something else"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_made_anew(damage: str, path: Path, tmp_path: Path) -> None:
    good = Model(path).memory(tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    DAMAGE[damage](file)
    again, after = Model(path), Model(path)
    np.testing.assert_array_equal(again.memory(tmp_path / "cache"), good)
    np.testing.assert_array_equal(after.memory(tmp_path / "cache"), good)
    assert (again.packed, after.packed) == (1, 0)


def test_a_changed_model_is_packed_anew(path: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    old = Model(path).memory(cache)
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)
    changed = Model(path)
    assert not np.array_equal(changed.memory(cache), old)
    assert changed.packed == 1
    assert len(list(cache.iterdir())) == 1


def test_another_layout_version_is_packed_anew(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Model(path).memory(tmp_path / "cache")
    monkeypatch.setattr(weight_cache, "PACKED_LAYOUT_VERSION", 10**6)
    again = Model(path)
    again.memory(tmp_path / "cache")
    assert again.packed == 1


def test_what_the_same_files_are_taken_for_is_part_of_the_key(tmp_path: Path) -> None:
    """The format that zero points were stored in, and what floats are rounded to."""
    cache = tmp_path / "cache"
    write_quantized(tmp_path / "model", Scheme("gptq"))
    first = Model(tmp_path / "model").memory(cache)
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('format": "gptq"', 'format": "gptq_v2"'))
    other = Model(tmp_path / "model")
    assert not np.array_equal(other.memory(cache), first)
    assert other.packed == 1

    save(tiny_model("llama", SIZES), tmp_path / "floats")
    roundings: tuple[Rounding | None, ...] = (None, "int8", "int4", "int4", None)
    packed = []
    for rounding in roundings:
        model = Model(tmp_path / "floats")
        if rounding is not None:
            model.source = RoundedWeights(model.source, rounding)
            model.places = places_of(parts_of(model.source.config), model.source)
        model.memory(cache)
        packed.append(model.packed)
    assert packed == [1, 1, 1, 0, 1]


def test_no_memory_for_the_weights_is_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(size: int) -> Memory:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(weight_cache, "anonymous_memory", refused)
    with pytest.raises(StartupError, match=r"no memory for weights of \d+ bytes: Cannot allocate"):
        Model(path).memory(None)


def test_a_folder_that_cannot_be_written_costs_only_time(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    model = Model(path)
    np.testing.assert_array_equal(model.memory(tmp_path / "file" / "cache"), model.memory(None))
    assert "cannot be written" in caplog.text


def test_two_starts_at_once_do_not_disturb_each_other(path: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    good = Model(path).memory(cache)
    (file,) = cache.iterdir()
    file.unlink()
    with file.with_suffix(".new").open("wb") as other:  # as if another process were writing
        fcntl.flock(other, fcntl.LOCK_EX)
        busy = Model(path)
        np.testing.assert_array_equal(busy.memory(cache), good)
        assert not file.exists()
    free = Model(path)
    free.memory(cache)
    assert [entry.name for entry in cache.iterdir()] == [file.name]


def test_a_failed_start_leaves_nothing(path: Path, tmp_path: Path) -> None:
    model = Model(path)

    def pack(to: Memory) -> None:
        raise StartupError("no")

    with pytest.raises(StartupError):
        packed_memory(tmp_path / "cache", model.files, model.places, pack)
    assert list((tmp_path / "cache").iterdir()) == []


def test_folders_and_files_give_the_same_weights(tmp_path: Path) -> None:
    """safetensors in float32, and a GGUF twin with its q and k reordered."""
    network = tiny_model("llama", {})
    save(network, tmp_path / "folder")
    write_gguf(network, tmp_path / "twin.gguf")
    np.testing.assert_array_equal(
        Model(tmp_path / "folder").memory(None), Model(tmp_path / "twin.gguf").memory(None)
    )


def test_progress_ends_at_the_total(path: Path) -> None:
    model = Model(path)
    seen: list[tuple[int, int]] = []
    to = np.empty(model.places[-1].offset + model.places[-1].num_bytes + 64, np.uint8)
    pack_weights(model.places, model.source, to, 1, lambda *at: seen.append(at))
    assert seen[-1][0] == seen[-1][1]
    assert seen == sorted(seen)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    network = tiny_model("llama", {})
    save(network, tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    )
    with pytest.raises(StartupError, match=r"model\.layers\.2\.\S+ .*missing from the weights"):
        Model(tmp_path)
    (tmp_path / "config.json").write_text(config.replace('"vocab_size": 96', '"vocab_size": 97'))
    with pytest.raises(StartupError, match=r"has shape \[96, 48\], the model needs \[97, 48\]"):
        Model(tmp_path)


def test_checksum_sees_every_byte() -> None:
    raw = np.random.default_rng(0).integers(0, 256, 203, dtype=np.uint8)
    sums = {checksum(raw)}
    for at in range(len(raw)):
        changed = raw.copy()
        changed[at] ^= 1 << (at % 8)
        sums.add(checksum(changed))
    sums |= {checksum(raw[:length].copy()) for length in range(len(raw))}
    assert len(sums) == 2 * len(raw) + 1
