"""Which files a model is made of, found and named the same way by every process; no weights."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from triptych.services.runtime.lifecycle import StartupError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_HUB_PATTERNS = ("*.json", "*.safetensors", "tokenizer*", "*.jinja")
_EDGE_BYTES = 1 << 16
_WHOLE_BYTES = 1 << 24

SAFETENSORS_FILE = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine: one GGUF file, or a folder in Hugging Face's layout."""

    kind: Literal["gguf", "folder"]
    path: Path
    name: str


def resolve_model(model: str) -> ModelFiles:
    """Find the model that a path or a Hugging Face hub id ("org/name") means.

    A folder's weights are `model.safetensors`, else what `model.safetensors.index.json` lists (the
    order of transformers). Pickled weights are never read. Raises StartupError saying what lacks.
    """
    if not model:
        raise StartupError("no model: use --model with a GGUF file, a folder or a hub id")
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            return _folder(path, path.resolve().name)
        if path.is_file():
            return _single_file(path)
    except OSError as error:
        raise StartupError(f"model {model!r:.200}: {error.strerror}") from error
    if _HUB_ID.fullmatch(model):
        return _folder(_download(model), model)
    raise StartupError(f"model {model!r:.200}: no such file or folder, and not a hub id (org/name)")


def fingerprint(files: ModelFiles) -> str:
    """A digest of names, sizes and contents (of large files: both ends), equal in every process.

    Costs milliseconds. Does not depend on where the files are, nor on their times. Raises
    StartupError for a file that cannot be read.
    """
    try:
        return _fingerprint(files)
    except OSError as error:
        raise StartupError(f"{error.filename or files.path}: {error.strerror}") from error


def _fingerprint(files: ModelFiles) -> str:
    if files.kind == "gguf":
        paths = [files.path]
    else:
        kinds = {".json", ".safetensors", ".jinja", ".model"}
        paths = sorted(p for p in files.path.iterdir() if p.suffix in kinds and p.is_file())
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        name = "model.gguf" if files.kind == "gguf" else path.name
        digest.update(f"{name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= _WHOLE_BYTES:
                digest.update(file.read())
            else:
                digest.update(file.read(_EDGE_BYTES))
                file.seek(size - _EDGE_BYTES)
                digest.update(file.read())
    return digest.hexdigest()[:32]


def _single_file(path: Path) -> ModelFiles:
    if path.suffix in _PICKLES:
        raise StartupError(f"{path}: pickled weights are never read; use safetensors or GGUF")
    if path.suffix == ".safetensors":
        raise StartupError(f"{path}: name the folder that holds it and its config.json")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise StartupError(f"{path}: not a GGUF file")
    if re.search(r"-\d{5}-of-\d{5}$", path.stem):
        raise StartupError(f"{path}: split GGUF files are not supported; merge them first")
    return ModelFiles("gguf", path, path.stem)


def _folder(path: Path, name: str) -> ModelFiles:
    names = {entry.name for entry in path.iterdir()}
    if "config.json" not in names:
        ggufs = sorted(entry for entry in names if entry.endswith(".gguf"))
        if len(ggufs) == 1:
            return ModelFiles("gguf", _single_file(path / ggufs[0]).path, name)
        if ggufs:
            raise StartupError(f"{path} holds {len(ggufs)} GGUF files; name one: {_listed(ggufs)}")
        raise StartupError(f"{path}: config.json is missing")
    if SAFETENSORS_FILE in names or SAFETENSORS_INDEX in names:
        return ModelFiles("folder", path, name)
    pickles = sorted(entry for entry in names if entry.endswith(_PICKLES))
    if pickles:
        raise StartupError(
            f"{path} holds pickled weights only ({_listed(pickles)}), which are never read: "
            f"convert them to safetensors"
        )
    raise StartupError(f"{path}: neither {SAFETENSORS_FILE} nor {SAFETENSORS_INDEX} is there")


def _download(model: str) -> Path:
    """Fetch what is needed of a hub repository, or find it in the hub's local cache."""
    from huggingface_hub import list_repo_files, snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # What the hub's HTTP client raises without a network is no OSError; which client it is, differs
    # between versions of the hub's package.
    http_error: type[Exception] = HfHubHTTPError.__bases__[0]

    patterns = [*_HUB_PATTERNS]
    cached_only = False
    try:
        try:
            names = list_repo_files(model)
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            raise StartupError(f"model {model}: not found here nor on the hub") from error
        except (OSError, http_error):  # no network, offline mode, hub down: what is cached may do
            cached_only = True
            patterns.append("*.gguf")
        else:
            patterns += _gguf_patterns(model, names)
        return Path(snapshot_download(model, allow_patterns=patterns, local_files_only=cached_only))
    except (OSError, ValueError, http_error) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StartupError(
            f"model {model}: no such file or folder, and the hub gave no answer: {reason:.300}"
        ) from error


def _gguf_patterns(model: str, names: list[str]) -> list[str]:
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if not ggufs or any(name.endswith(".safetensors") for name in names):
        return []
    if len(ggufs) > 1:
        raise StartupError(
            f"model {model} holds {len(ggufs)} GGUF files; download one and name its path: "
            f"{_listed(ggufs)}"
        )
    return ggufs


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
