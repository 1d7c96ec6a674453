import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from scripted_models import write_t1_tokenizer
from triptych.services.runtime.model_files import ModelFiles
from triptych.services.tokenizer.encoding import encoded
from triptych.services.tokenizer.tokenizer import load_tokenizer


@pytest.mark.parametrize("text", ["", "ab <|im_end|> é", "ab <|im_end|> é" * 1000])
def test_the_same_ids_for_any_length(tmp_path: Path, text: str) -> None:
    write_t1_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    assert encoded(backend, text) == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("parse_special", [True, False])
def test_a_long_text_leaves_other_threads_their_turns(tmp_path: Path, parse_special: bool) -> None:
    write_t1_tokenizer(tmp_path)
    tokenizer = load_tokenizer(ModelFiles("folder", tmp_path, "model"))
    text = "ab cd " * 100_000
    reader = threading.Thread(target=lambda: tokenizer.encode(text, parse_special=parse_special))
    reader.start()
    turns = 0
    while reader.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20
