"""How byte-level BPE vocabularies cut text into words: the values of `tokenizer.ggml.pre`.

The names are those of llama.cpp's vocabulary code (src/llama-vocab.cpp); the patterns are those of
the models' own tokenizer.json files. Patterns apply one after the other: each cuts the pieces that
the one before left, and what lies between two matches is a piece too.

Not here, so refused by name: `kimi-k2`, `afmoe` and `superbpe`, which need more than patterns, and
`gemma4`, `sarvam-moe` and `whitespace`, which are not byte-level.
"""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from triptych.services.runtime.lifecycle import StartupError


@dataclass(frozen=True, slots=True)
class WordRules:
    """One family of byte-level vocabularies."""

    splits: tuple[str, ...]
    ignore_merges: bool = False
    """A word that is a token as a whole is that token, whatever the merges say."""
    add_bos: bool = False
    """What holds where the file has no `tokenizer.ggml.add_bos_token`."""


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str, marks: str = r"[\r\n]*", letters: str = r"\p{L}", skip: str = "") -> str:
    """The GPT-4 shape: contraction, word with one character before it, digits, symbols, spaces."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}{skip}]+{marks}|{_SPACES}"
    )


def _cased_words(digits: str, suffix: str = "") -> str:
    """The o200k shape: a word ends where upper case follows lower case."""
    upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{upper}]*[{lower}]+{suffix}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[{upper}]+[{lower}]*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_GPT4O = _cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")
_CJK = r"[一-龥぀-ゟ゠-ヿ]+"  # noqa: RUF001 (a range of kana)
_DEEPSEEK_CJK = r"[一-龥ࠀ-一가-퟿]+"
_WESTERN_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3 = (
    rf"{_WESTERN_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"  # noqa: RUF001 (the commas of other scripts are meant)
_WIDE_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))

_FAMILIES: dict[tuple[str, ...], WordRules] = {
    ("default",): WordRules(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ),
    (
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
        "jina-v5-nano",
    ): WordRules((_LLAMA3,), ignore_merges=True, add_bos=True),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): WordRules((_LLAMA3,)),
    ("jais-2",): WordRules(
        (_LLAMA3.removesuffix(r"|\s+(?!\S)|\s+") + rf"|{_WIDE_SPACES}|\s{{1,2}}(?!\S)|\s",),
    ),
    ("minicpm5",): WordRules((r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True),
    (
        "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan",
        "solar-open", "grok-2",
    ): WordRules((_QWEN2,)),
    ("qwen35",): WordRules((_words(r"\p{N}", letters=r"\p{L}\p{M}", skip=r"\p{M}"),)),
    ("laguna",): WordRules((r"[^\n]+|[\n]+", _QWEN2)),
    ("seed-coder",): WordRules((_words(r"\p{N}", marks="", skip=r"\r\n"),)),
    ("bailingmoe", "bailingmoe2", "llada-moe"): WordRules(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        ),
    ),
    ("exaone-moe",): WordRules(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        ),
    ),
    (
        "gpt-2", "phi-2", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de",
        "jina-v2-code", "gigachat", "a.x-4.0", "mellum", "modern-bert", "roberta-bpe", "exaone4",
        "mpt", "olmo", "jais", "trillion", "granite-docling",
    ): WordRules((_GPT2,)),
    (
        "starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b",
        "mellum2",
    ): WordRules((r"\p{N}", _GPT2)),
    ("falcon",): WordRules((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    ("chameleon",): WordRules(
        (
            r"<sentinel:[0-9]+>", r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )",
            r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2,
        ),
        add_bos=True,
    ),
    # DeepSeek lists the cased letters one range after the other; they are these three categories.
    ("deepseek-llm",): WordRules(
        (
            r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+",  # noqa: RUF001
            r"\s+$", _DEEPSEEK_CJK, r"\p{N}+",
        ),
    ),
    ("deepseek-coder",): WordRules(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"),
    ),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm"): WordRules(
        (r"\p{N}{1,3}", _CJK, _DEEPSEEK3),
    ),
    ("tekken",): WordRules((_cased_words(r"\p{N}"),), ignore_merges=True, add_bos=True),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "inkling"): WordRules((_GPT4O,)),
    ("granite-embed-multi-97m",): WordRules((_GPT4O,), ignore_merges=True),
    ("tiny_aya", "cohere2moe"): WordRules((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    ("youtu",): WordRules(
        (
            r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _CJK,  # noqa: RUF001
            _cased_words(r"\p{N}", f"{_CONTRACTIONS}?"),
        ),
        ignore_merges=True,
    ),
    ("bloom", "poro-chat", "gpt3-finnish"): WordRules((_BLOOM,)),
    ("viking",): WordRules((_BLOOM, r"\p{N}")),
}  # fmt: skip

_RULES = {name: rules for names, rules in _FAMILIES.items() for name in names}

PRE_TOKENIZER_NAMES = frozenset(_RULES)


def word_rules(name: str) -> WordRules:
    """The rules of one `tokenizer.ggml.pre` value. Raises StartupError for an unknown one."""
    rules = _RULES.get(name)
    if rules is None:
        known = ", ".join(sorted(_RULES))
        raise StartupError(f"tokenizer.ggml.pre {name!r:.80} is not supported; known: {known}")
    return rules


def build_pre_tokenizer(rules: WordRules) -> pre_tokenizers.PreTokenizer:
    """The splits, then the byte letters of GPT-2 (its own pattern off: `rules` has it)."""
    splits = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in rules.splits]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, letters])
