"""resolve_model and fingerprint: every way to name a model, and every way to name none."""

import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from gguf_files import RawGguf, string
from scripted_models import write_m2_random_llama
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import ModelFiles, fingerprint, resolve_model

GGUF = RawGguf({"general.architecture": string("llama")}, ()).write()


def folder(path: Path, *names: str) -> Path:
    path.mkdir(exist_ok=True)
    for name in names:
        (path / name).write_bytes(GGUF if name.endswith(".gguf") else b"{}")
    return path


def test_a_gguf_file(tmp_path: Path) -> None:
    path = folder(tmp_path, "Some-Model.Q4_1.gguf") / "Some-Model.Q4_1.gguf"
    assert resolve_model(str(path)) == ModelFiles("gguf", path, "Some-Model.Q4_1")


@pytest.mark.parametrize("weights", ["model.safetensors", "model.safetensors.index.json"])
def test_a_folder(weights: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "tiny", "config.json", weights, "pytorch_model.bin")
    assert resolve_model(str(path)) == ModelFiles("folder", path, "tiny")


def test_a_folder_of_one_gguf(tmp_path: Path) -> None:
    path = folder(tmp_path / "tiny", "a.gguf", "README.md")
    assert resolve_model(str(path)) == ModelFiles("gguf", path / "a.gguf", "tiny")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "config.json is missing"),
        (("model.safetensors",), "config.json is missing"),
        (("config.json",), "neither model.safetensors nor"),
        (("config.json", "pytorch_model.bin"), "pickled weights only .*never read"),
        (("config.json", "consolidated.00.pth"), "pickled weights only"),
        (("a.gguf", "b.gguf"), "2 GGUF files; name one: a.gguf, b.gguf"),
        (("a-00001-of-00002.gguf",), "split GGUF"),
    ],
)
def test_incomplete_folders(names: tuple[str, ...], message: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "m", *names)
    with pytest.raises(StartupError, match=message) as caught:
        resolve_model(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.bin", "pickled weights are never read"),
        ("x.safetensors", "name the folder"),
        ("x.txt", "not a GGUF file"),
    ],
)
def test_wrong_files(name: str, message: str, tmp_path: Path) -> None:
    path = folder(tmp_path, name) / name
    with pytest.raises(StartupError, match=message):
        resolve_model(str(path))


@pytest.mark.parametrize("name", ["", "absent", "/absent/model.gguf", "a/b/c", "x" * 5000, "../x"])
def test_nothing_there(name: str) -> None:
    with pytest.raises(StartupError, match="model"):
        resolve_model(name)


class Hub:
    """Stands in for the hub's client: a listing, and what was asked to be fetched."""

    def __init__(self, names: list[str] | Exception, where: Path | Exception) -> None:
        self.names, self.where = names, where
        self.asked: dict[str, object] = {}

    def list_repo_files(self, repo: str) -> list[str]:
        if isinstance(self.names, Exception):
            raise self.names
        return self.names

    def snapshot_download(self, repo: str, **options: object) -> str:
        self.asked = options
        if isinstance(self.where, Exception):
            raise self.where
        return str(self.where)


def use(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> Hub:
    monkeypatch.setattr(huggingface_hub, "list_repo_files", hub.list_repo_files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def test_a_hub_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = folder(tmp_path / "snapshot", "config.json", "model.safetensors")
    names = ["config.json", "model.safetensors", "pytorch_model.bin", "x.gguf"]
    hub = use(monkeypatch, Hub(names, path))
    assert resolve_model("org/name") == ModelFiles("folder", path, "org/name")
    patterns = hub.asked["allow_patterns"]
    assert isinstance(patterns, list)
    assert "*.safetensors" in patterns
    assert not any("gguf" in each or "bin" in each for each in patterns)


def test_a_hub_gguf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = folder(tmp_path / "snapshot", "x.gguf")
    hub = use(monkeypatch, Hub(["README.md", "x.gguf"], path))
    assert resolve_model("org/name") == ModelFiles("gguf", path / "x.gguf", "org/name")
    patterns = hub.asked["allow_patterns"]
    assert isinstance(patterns, list)
    assert "x.gguf" in patterns


def test_a_hub_repository_of_many_ggufs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, Hub(["a.gguf", "b.gguf"], tmp_path))
    with pytest.raises(StartupError, match="2 GGUF files; download one"):
        resolve_model("org/name")


def no_such_host() -> Exception:
    """As the hub's HTTP client raises it."""
    base: type[Exception] = HfHubHTTPError.__bases__[0]
    assert not issubclass(base, OSError)
    return base("[Errno -2] Name or service not known")


@pytest.mark.parametrize(
    "error",
    [
        OfflineModeIsEnabled("offline"),
        ConnectionError("no route\nto host"),
        OSError("x"),
        no_such_host(),
    ],
)
def test_no_network(error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the cache holds is used; else one line."""
    path = folder(tmp_path / "snapshot", "config.json", "model.safetensors")
    hub = use(monkeypatch, Hub(error, path))
    assert resolve_model("org/name").path == path
    assert hub.asked["local_files_only"] is True
    use(monkeypatch, Hub(error, LocalEntryNotFoundError("not cached\nmore")))
    with pytest.raises(StartupError, match=r"model org/name: .* no answer: not cached$"):
        resolve_model("org/name")


def test_fingerprints(tmp_path: Path) -> None:
    write_m2_random_llama(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first = fingerprint(resolve_model(str(tmp_path / "a")))
    assert first == fingerprint(resolve_model(str(tmp_path / "b")))
    assert len(first) == 32
    config = tmp_path / "b" / "config.json"
    config.write_text(config.read_text() + " ")
    assert first != fingerprint(resolve_model(str(tmp_path / "b")))
    write_m2_random_llama(tmp_path / "c", seed=1)
    assert first != fingerprint(resolve_model(str(tmp_path / "c")))


def test_fingerprint_of_a_large_file_reads_its_ends(tmp_path: Path) -> None:
    prints = set()
    for name, at in (("a", None), ("b", 8), ("c", 20 << 20)):
        path = tmp_path / f"{name}.gguf"
        with path.open("wb") as file:
            file.write(GGUF)
            file.truncate(20 << 20)
            if at is not None:
                file.seek(at)
                file.write(b"x")
        prints.add(fingerprint(ModelFiles("gguf", path, name)))
    assert len(prints) == 3


def test_fingerprint_of_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    gone = ModelFiles("gguf", tmp_path / "gone.gguf", "gone")
    with pytest.raises(StartupError, match=r"gone\.gguf: No such file"):
        fingerprint(gone)
