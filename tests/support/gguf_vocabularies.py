"""GGUF files that hold a vocabulary and nothing else, for tests of the tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gguf import GGUFWriter

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass
class GgufVocabulary:
    """`tokenizer.ggml.*` of one file. Empty columns are left out of it."""

    model: str = "gpt2"
    pre: str | None = "gpt-2"
    tokens: list[str] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    merges: Sequence[str] = ()
    ids: dict[str, int] = field(default_factory=dict)
    """Such as {"bos_token_id": 1}."""
    flags: dict[str, bool] = field(default_factory=dict)
    """Such as {"add_bos_token": True}."""
    chat_template: str | None = None
    tool_template: str | None = None

    def add(self, token: str, kind: int = NORMAL, score: float = 0.0) -> int:
        """Append a token; returns its id."""
        self.tokens.append(token)
        self.kinds.append(kind)
        self.scores.append(score)
        return len(self.tokens) - 1

    def write(self, path: Path) -> Path:
        """Write the file; returns its path."""
        writer = GGUFWriter(path, "llama")
        writer.add_tokenizer_model(self.model)
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        if self.tokens:
            writer.add_token_list(self.tokens)
        if self.kinds:
            writer.add_token_types(self.kinds)
        if self.scores:
            writer.add_token_scores(self.scores)
        if self.merges:
            writer.add_token_merges(list(self.merges))
        for key, token_id in self.ids.items():
            writer.add_uint32(f"tokenizer.ggml.{key}", token_id)
        for key, flag in self.flags.items():
            writer.add_bool(f"tokenizer.ggml.{key}", flag)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)
        if self.tool_template is not None:
            writer.add_string("tokenizer.chat_template.tool_use", self.tool_template)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path
