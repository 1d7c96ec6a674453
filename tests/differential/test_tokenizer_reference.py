"""Token ids against transformers on the same files, and against SentencePiece's rule."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from gguf_vocabularies import BYTE, CONTROL, NORMAL, UNKNOWN, GgufVocabulary
from scripted_models import CHATML_TEMPLATE, write_t1_tokenizer, write_t2_tokenizer
from triptych.services.runtime.model_files import ModelFiles
from triptych.services.tokenizer.chat_messages import ChatMessage, ChatOptions
from triptych.services.tokenizer.pre_tokenizers import build_pre_tokenizer, word_rules
from triptych.services.tokenizer.tokenizer import Tokenizer, load_tokenizer

STRINGS = [
    "", " ", "  ", "Hello, world!", " leading", "trailing ", "a  1", "x  12 345 6", "3.14159",
    "1,000,000", "I'm he's WE'LL don't", "tabs\tand\r\nlines\n\n\n  end", "世界 你好。",
    "日本語テスト",
    "emoji 🙂👩‍👩‍👧 flags 🇫🇷", "naïve café e\u0301", "def f(x):\n    return x ** 2  # two\n",
    '{"a": [1, 2]}', "<div class='x'>&amp;</div>", "٣٤٥ ½ ²", "Ωμέγα Привет שלום", "_" * 30,
    "a\u00a0b\u2003c\u200bd", "<|im_start|>user\nhi<|im_end|>\n", "<|im_end|> spaced <|im_end|>",
    "\x00\x01\x7f", "\uff01\uff0c\u3000wide",
]  # fmt: skip
ALPHABET = [*"ab  1\n.'", "世", "🙂", "é", "  ", "\t", "12", "The ", "<|im_end|>", "\u00a0"]


def random_strings(count: int) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(ALPHABET, k=rng.randint(1, 24))) for _ in range(count)]


@pytest.fixture(scope="module")
def ours(smollm: Path) -> Tokenizer:
    return load_tokenizer(ModelFiles("gguf", smollm, "smollm"))


@pytest.fixture(scope="module")
def theirs(smollm: Path) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(smollm.parent, gguf_file=smollm.name)
    # transformers' importer leaves this one out; it is what the model's own tokenizer.json has
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


@pytest.mark.smollm
def test_smollm2_text(ours: Tokenizer, theirs: PreTrainedTokenizerFast) -> None:
    for text in [*STRINGS, *random_strings(500)]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        for skip in (True, False):
            whole = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == whole, text


@pytest.mark.smollm
def test_smollm2_chat(ours: Tokenizer, theirs: PreTrainedTokenizerFast) -> None:
    plain = [text for text in STRINGS if "<|" not in text]
    for first, second in zip(plain, reversed(plain), strict=True):
        texts = {"system": second, "user": first, "assistant": second}
        for roles in (("user",), ("system", "user", "assistant", "user")):
            messages = [ChatMessage(role, texts[role]) for role in roles]
            turns = [{"role": each.role, "content": each.content} for each in messages]
            for opened in (True, False):
                expected = theirs.apply_chat_template(
                    turns, add_generation_prompt=opened, tokenize=True, return_dict=False
                )
                assert ours.encode_chat(messages, ChatOptions(opened)) == expected


TEMPLATES = [
    CHATML_TEMPLATE,
    "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{{ eos_token }}{% endfor %}",
    "<|bos|>{{ messages[0]['content'] }}{{ messages | tojson }}",
    "{% for m in messages %}{{ '<|im_' + 'start|>' + m.role }}\n{{ m.content }}"
    "<|im_end|>{% endfor %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("add_bos", [True, False])
def test_chat_ids_of_a_folder(tmp_path: Path, template: str, add_bos: bool) -> None:
    write_t1_tokenizer(tmp_path, ["DEF"], add_bos=add_bos)
    (tmp_path / "chat_template.jinja").write_text(template)
    mine = load_tokenizer(ModelFiles("folder", tmp_path, "t1"))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    texts = [" Hello, 世界! ", "  yesDEF\n", "1 <b>2</b>"]
    roles = ["user", "assistant", "user"]
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    for opened in (True, False):
        expected = reference.apply_chat_template(
            turns, add_generation_prompt=opened, tokenize=True, return_dict=False
        )
        messages = [ChatMessage(turn["role"], turn["content"]) for turn in turns]
        assert mine.encode_chat(messages, ChatOptions(opened)) == expected


@pytest.mark.parametrize("add_special", [True, False])
def test_text_of_folders(tmp_path: Path, add_special: bool) -> None:
    write_t1_tokenizer(tmp_path / "t1", add_bos=True)
    write_t2_tokenizer(tmp_path / "t2")
    for name in ("t1", "t2"):
        mine = load_tokenizer(ModelFiles("folder", tmp_path / name, name))
        reference = AutoTokenizer.from_pretrained(tmp_path / name)
        for text in [*STRINGS, *random_strings(100)]:
            expected = reference.encode(text, add_special_tokens=add_special)
            ids = mine.encode(text, add_special_tokens=add_special)
            assert ids == expected, text
            for skip in (True, False):
                whole = reference.decode(ids, skip_special_tokens=skip)
                assert mine.decode(ids, skip_special_tokens=skip) == whole, text


@pytest.mark.parametrize("pre", sorted(GGUF_PRE_TOKENIZER_SPLITS))
def test_words_end_where_transformers_ends_them(pre: str) -> None:
    rng = random.Random(3)
    alphabet = [
        *"aBcÉé  1\n\r\t.'s/-_世ぁ가ßǅʰ\u0301🙂½",
        "'S",
        "'ll",
        "  ",
        "12345",
        "\r\n",
        "Ab",
        "aB",
    ]
    reference = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    mine = build_pre_tokenizer(word_rules(pre))
    for text in [*STRINGS, *("".join(rng.choices(alphabet, k=30)) for _ in range(200))]:
        assert mine.pre_tokenize_str(text) == reference.pre_tokenize_str(text), text


def spm_vocabulary() -> GgufVocabulary:
    """Pieces as BPE training makes them: each the join of two earlier ones, score falling."""
    rng = random.Random(1)
    vocabulary = GgufVocabulary(model="llama", pre=None)
    vocabulary.ids["unknown_token_id"] = vocabulary.add("<unk>", UNKNOWN)
    vocabulary.ids["bos_token_id"] = vocabulary.add("<s>", CONTROL)
    vocabulary.ids["eos_token_id"] = vocabulary.add("</s>", CONTROL)
    for byte in range(256):
        vocabulary.add(f"<0x{byte:02X}>", BYTE)
    letters = list("▁abcde")
    pieces = list(letters)
    while len(pieces) < 120:
        joined = rng.choice(pieces) + rng.choice(pieces)
        if len(joined) <= 6 and joined not in pieces:
            pieces.append(joined)
    for rank, piece in enumerate([*pieces[len(letters) :], *letters]):
        vocabulary.add(piece, score=-float(rank))
    return vocabulary


def spm_encode(vocabulary: GgufVocabulary, text: str) -> list[int]:
    """SentencePiece's BPE: join the neighbours whose piece scores best, the leftmost of equals."""
    ids = {
        token: (token_id, vocabulary.scores[token_id])
        for token_id, token in enumerate(vocabulary.tokens)
        if vocabulary.kinds[token_id] == NORMAL
    }
    symbols = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        joins = [
            (-ids[left + right][1], at)
            for at, (left, right) in enumerate(pairwise(symbols))
            if left + right in ids
        ]
        if not joins:
            break
        _, at = min(joins)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    out: list[int] = []
    for symbol in symbols:
        out += [ids[symbol][0]] if symbol in ids else [3 + byte for byte in symbol.encode()]
    return out


def test_sentencepiece_from_gguf(tmp_path: Path) -> None:
    vocabulary = spm_vocabulary()
    path = vocabulary.write(tmp_path / "spm.gguf")
    mine = load_tokenizer(ModelFiles("gguf", path, "spm"))
    rng = random.Random(2)
    texts = ["".join(rng.choices("abcde   é世\n", k=rng.randint(0, 30))) for _ in range(500)]
    for text in texts:
        ids = mine.encode(text, add_special_tokens=False)
        assert ids == spm_encode(vocabulary, text), text
        assert mine.decode(ids) == text
