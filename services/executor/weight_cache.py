"""Packed weights on disk, so that a second start only maps them.

One file a model, under a folder of the user's. A file is used only if all of it is what was
written for exactly this model by exactly this layout; any other is replaced. Files are written
aside and renamed into place. Whatever goes wrong with the folder costs time, not the start.
"""

import fcntl
import hashlib
import json
import logging
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from triptych.kernels.cpu import PACKED_LAYOUT_VERSION, checksum
from triptych.services.executor.near_weights import NearMemory
from triptych.services.executor.packed_weights import Place, anonymous_memory, total_bytes
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import ModelFiles, fingerprint

SMALLEST_BYTES = 16 << 20
"""Smaller models are packed faster than anyone notices, and leave no file behind."""

_MAGIC = b"TRIPTYCH PACKED\n"
_HEADER = struct.Struct("<16s32sQQ")  # magic, key, bytes of weights, their checksum
_DATA_START = mmap.PAGESIZE

_log = logging.getLogger(__name__)

Memory = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class WeightCache:
    """The cached weights of one model."""

    path: Path
    key: bytes

    @classmethod
    def of(cls, folder: Path, files: ModelFiles, places: Sequence[Place]) -> "WeightCache":
        """The cache of a model: the file's name says where the model is, the key what it is."""
        place = str(files.path.resolve())
        name = hashlib.sha256(place.encode()).hexdigest()[:24]
        return cls(folder / f"{name}.packed", _key(files, places))

    def load(self, size: int) -> Memory | None:
        """Map the weights, `size` bytes; None when there are none, or not these."""
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_uid != os.getuid() or stat.st_size != _DATA_START + size:
                    return None
                header = file.read(_HEADER.size)
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("weight cache %s: %s", self.path, error.strerror)
            return None
        magic, key, stored_size, stored_sum = _HEADER.unpack(header)
        memory = np.frombuffer(mapped, np.uint8, offset=_DATA_START)
        if (magic, key, stored_size) != (_MAGIC, self.key, size):
            _log.info("weight cache %s is of another model or version: packing anew", self.path)
            return None
        if checksum(memory) != stored_sum:
            _log.warning("weight cache %s is damaged: packing anew", self.path)
            return None
        return memory

    def fill(self, size: int, pack: Callable[[Memory], None]) -> Memory | None:
        """Pack into a new file, put it in place and map it; None when that cannot be."""
        aside = self.path.with_suffix(".new")
        try:
            descriptor = _open_aside(aside, _DATA_START + size)
        except OSError as error:
            _log.warning("weight cache %s cannot be written: %s", aside, error.strerror)
            return None
        if descriptor is None:
            return None
        try:
            mapped = mmap.mmap(descriptor, 0)
            memory = np.frombuffer(mapped, np.uint8, offset=_DATA_START)
            pack(memory)
            mapped[: _HEADER.size] = _HEADER.pack(_MAGIC, self.key, size, checksum(memory))
            aside.replace(self.path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return memory


def packed_memory(
    folder: Path | None,
    files: ModelFiles,
    places: Sequence[Place],
    pack: Callable[[Memory], None],
    near: NearMemory | None = None,
) -> tuple[Memory, bool]:
    """The packed weights, and whether they were cached. `folder` None: there is no cache.

    `near`: on a machine of several memory nodes, the memory to have them in; a mapped file, whose
    pages lie anywhere, is then copied there. Without it nothing is ever copied.
    Raises StartupError when there is no memory, and what `pack` raises.
    """
    size = total_bytes(places)
    mapped, cached = None, False
    if folder is not None and size >= SMALLEST_BYTES:
        cache = WeightCache.of(folder, files, places)
        mapped = cache.load(size)
        cached = mapped is not None
        if mapped is None:
            mapped = cache.fill(size, pack)
    try:
        if mapped is not None:
            return (mapped if near is None else near.copy_of(mapped)), cached
        memory = anonymous_memory(size) if near is None else near.allocate(size)
    except OSError as error:
        raise StartupError(f"no memory for weights of {size} bytes: {error.strerror}") from error
    pack(memory)
    return memory, False


def _key(files: ModelFiles, places: Sequence[Place]) -> bytes:
    paths = [files.path] if files.kind == "gguf" else sorted(files.path.glob("*.safetensors"))
    facts = {
        "layout": PACKED_LAYOUT_VERSION,
        "model": fingerprint(files),
        # The fingerprint reads large files at their ends only.
        "files": [[path.stat().st_size, path.stat().st_mtime_ns] for path in paths],
        "places": [
            [place.part.name, place.part.shape, place.type, place.offset] for place in places
        ],
    }
    return hashlib.sha256(json.dumps(facts).encode()).digest()


def _open_aside(path: Path, size: int) -> int | None:
    """A file of `size` bytes that nobody else writes; None while another process writes it.

    Raises OSError.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # It may have been renamed into place between the two calls above.
        if os.fstat(descriptor).st_ino != path.stat().st_ino:
            raise BlockingIOError
        os.ftruncate(descriptor, 0)
        os.posix_fallocate(descriptor, 0, size)  # now rather than as SIGBUS in the middle
    except (BlockingIOError, FileNotFoundError):
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise
    return descriptor
