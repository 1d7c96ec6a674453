"""The tokenizer of a model folder in Hugging Face's layout, without transformers.

Reads tokenizer.json (which holds the whole pipeline), tokenizer_config.json and, where they are
there, special_tokens_map.json, generation_config.json, config.json and chat_template.jinja.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from triptych.services.runtime.lifecycle import StartupError
from triptych.services.tokenizer.tokenizer_parts import TokenizerParts, around_text

_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_MAX_JSON_BYTES = 256 << 20


def read_folder_tokenizer(folder: Path) -> TokenizerParts:
    """Raises StartupError naming the file that is missing or broken."""
    config = _read_json(folder / "tokenizer_config.json")
    named = _named_tokens({**_read_json(folder / "special_tokens_map.json"), **config})
    backend = _read_backend(folder / "tokenizer.json")
    _mark_special(backend, config, named)
    _set_added_around(backend, config, named)
    bos, unk = named.get("bos_token"), named.get("unk_token")
    return TokenizerParts(
        backend=backend,
        vocabulary_size=max(backend.get_vocab().values(), default=-1) + 1,
        bos_token_id=backend.token_to_id(bos) if bos else None,
        eos_token_ids=_eos_ids(folder, backend, named),
        unk_token_id=backend.token_to_id(unk) if unk else None,
        special_tokens=named,
        chat_template=_chat_template(folder, config),
        tool_template=_tool_template(folder, config),
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise StartupError(
            f"{path} is missing; other tokenizer formats (tokenizer.model, vocab.txt) are not "
            "read: save it once with transformers' AutoTokenizer"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise StartupError(f"{path}: {error!s:.300}") from error
    # Settings of the training pipeline that are saved along: they would cut or fill prompts.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, object]:
    """An object; empty when there is no such file."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise StartupError(f"{path}: more than {_MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path}: not a JSON object")
    return value


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _named_tokens(config: Mapping[str, object]) -> dict[str, str]:
    found = {name: _token_text(config.get(name)) for name in _NAMES}
    return {name: text for name, text in found.items() if text is not None}


def _mark_special(
    backend: tokenizers.Tokenizer, config: Mapping[str, object], named: Mapping[str, str]
) -> None:
    """Make special what the config calls special, as transformers does; never adds an id."""
    wanted = set(named.values())
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(key)
        values = list(extra.values()) if isinstance(extra, dict) else extra
        if isinstance(values, list):
            wanted |= {text for each in values if (text := _token_text(each))}
    details = config.get("added_tokens_decoder")
    for detail in details.values() if isinstance(details, dict) else ():
        text = _token_text(detail)
        if text and isinstance(detail, dict) and detail.get("special") is True:
            wanted.add(text)
    added = {each.content: each for each in backend.get_added_tokens_decoder().values()}
    for text in sorted(wanted):
        known = added.get(text)
        if backend.token_to_id(text) is None or (known is not None and known.special):
            continue
        backend.add_special_tokens(
            [
                AddedToken(
                    text,
                    single_word=known.single_word if known else False,
                    lstrip=known.lstrip if known else False,
                    rstrip=known.rstrip if known else False,
                    normalized=known.normalized if known else False,
                    special=True,
                )
            ]
        )


def _set_added_around(
    backend: tokenizers.Tokenizer, config: Mapping[str, object], named: Mapping[str, str]
) -> None:
    """`add_bos_token` and `add_eos_token` of the config win, as in transformers."""
    if not {"add_bos_token", "add_eos_token"} & config.keys():
        return

    def wanted(name: str) -> tuple[str, int] | None:
        text = named.get(name)
        token_id = backend.token_to_id(text) if text else None
        return (
            (text, token_id)
            if text and token_id is not None and config.get(f"add_{name}")
            else None
        )

    backend.post_processor = around_text(wanted("bos_token"), wanted("eos_token"))


def _eos_ids(
    folder: Path, backend: tokenizers.Tokenizer, named: Mapping[str, str]
) -> tuple[int, ...]:
    """generation_config.json knows best: it lists all tokens that end an answer."""
    size = max(backend.get_vocab().values(), default=-1) + 1
    for name in ("generation_config.json", "config.json"):
        config = _read_json(folder / name)
        text_config = config.get("text_config")
        for source in (config, text_config if isinstance(text_config, dict) else {}):
            value = source.get("eos_token_id")
            if value is None:
                continue
            values = value if isinstance(value, list) else [value]
            ids = [each for each in values if type(each) is int and 0 <= each < size]
            if len(ids) < len(values):
                raise StartupError(
                    f"{folder / name}: eos_token_id: {value!r:.80} is not a token id,"
                    f" or a list of them, below {size}"
                )
            if ids:
                return tuple(dict.fromkeys(ids))
    eos = named.get("eos_token")
    token_id = backend.token_to_id(eos) if eos else None
    return () if token_id is None else (token_id,)


def _chat_template(folder: Path, config: Mapping[str, object]) -> str | None:
    """chat_template.jinja, else the config's: a string, or a list of which "default" is meant."""
    own = _template_file(folder / "chat_template.jinja")
    if own is not None:
        return own
    value = config.get("chat_template")
    return _named_template(value, "default") if isinstance(value, list) else _source(value)


def _tool_template(folder: Path, config: Mapping[str, object]) -> str | None:
    """The one named "tool_use", which transformers takes for chats with tools."""
    if (folder / "chat_template.jinja").is_file():  # then the list in the config is an older one
        return _template_file(folder / "additional_chat_templates" / "tool_use.jinja")
    return _named_template(config.get("chat_template"), "tool_use")


def _template_file(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{path}: {error}") from error


def _named_template(value: object, name: str) -> str | None:
    if not isinstance(value, list):
        return None
    named = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
    return _source(named.get(name))


def _source(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
