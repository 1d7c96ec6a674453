"""Tokenizer folders that have a chat template with its special tokens."""

import json
from pathlib import Path

from chat_templates import PLAIN, SPECIAL
from scripted_models import T1_FIRST_PIECE, write_t1_tokenizer


def write_chat_tokenizer(folder: Path, template: str) -> dict[str, int]:
    """T1 with the tokens of chat_templates and a template. Returns text -> id of those tokens."""
    texts = (*SPECIAL, *PLAIN)
    write_t1_tokenizer(folder, texts)
    file = folder / "tokenizer.json"
    pipeline = json.loads(file.read_text())
    for token in pipeline["added_tokens"]:
        token["special"] = token["special"] or token["content"] in SPECIAL
    file.write_text(json.dumps(pipeline))
    (folder / "chat_template.jinja").write_text(template)
    return {text: T1_FIRST_PIECE + k for k, text in enumerate(texts)}
