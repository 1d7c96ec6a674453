"""What several of these suites start from."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler_bench import Engine, MakeEngine
from scripted_models import write_m2_random_llama, write_t1_tokenizer
from triptych.services.runtime.model_files import resolve_model
from triptych.services.tokenizer.server import LoadedModel
from triptych.services.tokenizer.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    write_t1_tokenizer(folder, ["DEF", "HI", "z" * 20_000])
    write_m2_random_llama(folder)
    tokenizer = load_tokenizer(resolve_model(str(folder)))
    return LoadedModel(tokenizer, "print", ("tiny", "alias"))


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[MakeEngine]:
    engines: list[Engine] = []

    def make(**settings: Any) -> Engine:
        engine = Engine(tmp_path / f"run{len(engines)}", **settings)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
