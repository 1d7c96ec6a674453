import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from scripted_models import (
    T1_BOS,
    T1_EOS,
    T1_IM_END,
    T1_UNK,
    T1_VOCABULARY,
    T2_BOS,
    T2_VOCABULARY,
    write_t1_tokenizer,
    write_t2_tokenizer,
)
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import ModelFiles
from triptych.services.tokenizer.chat_messages import ChatMessage
from triptych.services.tokenizer.tokenizer import Tokenizer, load_tokenizer


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(ModelFiles("folder", folder, "model"))


def change(file: Path, **values: object) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **values}))


def test_facts_of_a_byte_level_folder(tmp_path: Path) -> None:
    pieces = write_t1_tokenizer(tmp_path, ["DEF"])
    tokenizer = load(tmp_path)
    assert tokenizer.vocabulary_size == T1_VOCABULARY
    assert tokenizer.bos_token_id == T1_BOS
    assert tokenizer.eos_token_ids == (T1_EOS,)
    assert tokenizer.special_token_ids == {T1_UNK, T1_BOS, T1_EOS, T1_EOS + 1, T1_IM_END}
    assert tokenizer.has_chat_template
    assert tokenizer.encode("aDEF世") == [ord("a"), pieces["DEF"], *"世".encode()]
    assert tokenizer.token_bytes(0xE4) == b"\xe4"
    assert tokenizer.token_bytes(pieces["DEF"]) == b"DEF"


def test_facts_of_a_sentencepiece_folder(tmp_path: Path) -> None:
    pieces = write_t2_tokenizer(tmp_path)
    tokenizer = load(tmp_path)
    assert tokenizer.vocabulary_size == T2_VOCABULARY
    ids = [T2_BOS, pieces["▁hello"], pieces["▁world"]]
    assert tokenizer.encode("hello world") == ids
    assert tokenizer.decode(ids) == "hello world"
    assert tokenizer.token_bytes(pieces["▁world"]) == b" world"
    assert tokenizer.token_bytes(3 + 0xE4) == b"\xe4"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [T1_IM_END, T1_EOS]}, {"eos_token_id": 7}, (T1_IM_END, T1_EOS)),
        ({"eos_token_id": T1_IM_END}, {}, (T1_IM_END,)),
        ({"eos_token_id": None}, {"eos_token_id": 7}, (7,)),
        ({}, {"text_config": {"eos_token_id": [8]}}, (8,)),
        ({}, {}, (T1_EOS,)),
    ],
)
def test_which_tokens_end_an_answer(
    tmp_path: Path,
    generation: Mapping[str, object],
    config: Mapping[str, object],
    expected: tuple[int, ...],
) -> None:
    write_t1_tokenizer(tmp_path)
    change(tmp_path / "generation_config.json", **generation)
    change(tmp_path / "config.json", **config)
    assert load(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("broken", ["2", 2.5, True, -1, T1_VOCABULARY, {}, [T1_EOS, "x"], [-1]])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_a_broken_end_of_sequence_id_stops_the_start(
    tmp_path: Path, file: str, broken: object
) -> None:
    write_t1_tokenizer(tmp_path)
    change(tmp_path / file, eos_token_id=broken)
    with pytest.raises(StartupError, match=rf"{file}: eos_token_id: .* below 320"):
        load(tmp_path)


@pytest.mark.parametrize("add_bos", [True, False])
def test_the_config_decides_about_bos(tmp_path: Path, add_bos: bool) -> None:
    write_t1_tokenizer(tmp_path, add_bos=not add_bos)
    change(tmp_path / "tokenizer_config.json", add_bos_token=add_bos, add_eos_token=True)
    bos = [T1_BOS] if add_bos else []
    assert load(tmp_path).encode("a") == [*bos, ord("a"), T1_EOS]
    assert load(tmp_path).encode("a<|eos|>") == [*bos, ord("a"), T1_EOS]


def test_tokens_that_only_the_config_calls_special(tmp_path: Path) -> None:
    pieces = write_t1_tokenizer(tmp_path, ["<pad>", "<extra>", "<more>", "<plain>"])
    change(
        tmp_path / "tokenizer_config.json",
        pad_token={"content": "<pad>"},
        additional_special_tokens=["<extra>", "<not there>"],
        added_tokens_decoder={"263": {"content": "<more>", "special": True}},
    )
    tokenizer = load(tmp_path)
    special = {pieces["<pad>"], pieces["<extra>"], pieces["<more>"]}
    assert special <= tokenizer.special_token_ids
    assert pieces["<plain>"] not in tokenizer.special_token_ids
    assert tokenizer.vocabulary_size == T1_VOCABULARY


def test_truncation_and_padding_of_the_training_pipeline_are_off(tmp_path: Path) -> None:
    write_t1_tokenizer(tmp_path)
    change(
        tmp_path / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    )
    assert len(load(tmp_path).encode("a" * 100)) == 100


def test_of_several_templates_the_default_is_used(tmp_path: Path) -> None:
    write_t1_tokenizer(tmp_path)
    templates = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    change(tmp_path / "tokenizer_config.json", chat_template=templates)

    assert load(tmp_path).encode_chat([ChatMessage("user", "x")]) == [ord("D")]
    (tmp_path / "chat_template.jinja").write_text("J")
    assert load(tmp_path).encode_chat([ChatMessage("user", "x")]) == [ord("J")]


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.json is missing"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        load(tmp_path)
    write_t1_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(StartupError, match=r"tokenizer_config\.json: not JSON"):
        load(tmp_path)
