"""The scripted models do what their docstrings say, as Hugging Face transformers reads them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripted_models import (
    LOGIT_OF_ZERO,
    T1_BOS,
    T1_EOS,
    T1_FIRST_PIECE,
    T1_IM_END,
    T1_IM_START,
    T1_VOCABULARY,
    T2_BOS,
    T2_FIRST_BYTE,
    write_m2_random_llama,
    write_s1_markov,
    write_s2_positions,
    write_t1_tokenizer,
    write_t2_tokenizer,
)


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def hf_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def test_t1_maps_every_byte_to_its_value(tmp_path: Path) -> None:
    write_t1_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    text = "A 世\n\U0001f600 é"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.get_vocab_size() == T1_VOCABULARY
    for bad in (b"\xff\xc3(\xe4\xb8\xad", b"\xf0\x9f"):
        assert tokenizer.decode(list(bad)) == bad.decode("utf-8", errors="replace")


def test_t1_pieces_and_special_tokens(tmp_path: Path) -> None:
    pieces = write_t1_tokenizer(tmp_path, ["DEF", " the", "世界"])
    tokenizer = load_tokenizer(tmp_path)
    assert pieces == {"DEF": T1_FIRST_PIECE, " the": T1_FIRST_PIECE + 1, "世界": T1_FIRST_PIECE + 2}
    assert tokenizer.encode("aDEF the").ids == [97, T1_FIRST_PIECE, T1_FIRST_PIECE + 1]
    mixed = [97, T1_IM_END, *pieces.values(), T1_EOS, 98]
    assert tokenizer.decode(mixed) == "aDEF the世界b"
    kept = tokenizer.decode(mixed, skip_special_tokens=False)
    assert kept == "a<|im_end|>DEF the世界<|eos|>b"
    with pytest.raises(ValueError, match="at most 59"):
        write_t1_tokenizer(tmp_path, [f"p{k}" for k in range(60)])


def test_t1_bos_and_chat_template(tmp_path: Path) -> None:
    write_t1_tokenizer(tmp_path, add_bos=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("hi")["input_ids"] == [T1_BOS, *b"hi"]
    chat = [{"role": "user", "content": "hi"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    turn = [T1_IM_START, *b"user\nhi", T1_IM_END, *b"\n"]
    assert ids == [*turn, T1_IM_START, *b"assistant\n"]
    assert tokenizer.eos_token_id == T1_EOS


def test_t2_word_starts_and_byte_fallback(tmp_path: Path) -> None:
    pieces = write_t2_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    hello, world, ok, blank = (pieces[p] for p in ("▁hello", "▁world", "ok", "▁"))
    ids = tokenizer.encode("hello world ok").ids
    assert ids == [T2_BOS, hello, world, blank, ok]
    assert tokenizer.decode(ids) == "hello world ok"
    fallback = [T2_FIRST_BYTE + byte for byte in "中".encode()]
    assert tokenizer.encode("hello中", add_special_tokens=False).ids == [hello, *fallback]
    assert tokenizer.decode([hello, *fallback, world]) == "hello中 world"
    assert AutoTokenizer.from_pretrained(tmp_path)("hello")["input_ids"] == [T2_BOS, hello]


def test_s1_distribution_is_the_table(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    table = random.dirichlet(np.full(T1_VOCABULARY, 0.1), size=T1_VOCABULARY)
    table[5] = 0.0
    table[5, [7, 9]] = (0.25, 0.75)
    write_s1_markov(tmp_path, table)
    tokens = [3, 5, 8, 319, 5]
    logits = hf_logits(tmp_path, tokens)
    probabilities = torch.softmax(logits.double(), dim=-1).numpy()
    assert np.abs(probabilities - table[tokens]).max() < 1e-6
    assert logits[1, 0].item() == pytest.approx(LOGIT_OF_ZERO, rel=1e-5)
    assert torch.isfinite(logits).all()


def test_s1_refuses_what_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        write_s1_markov(tmp_path, np.eye(65))
    with pytest.raises(ValueError, match="sum to 1"):
        write_s1_markov(tmp_path, np.eye(64) * 0.5)


def test_s2_greedy_follows_the_script(tmp_path: Path) -> None:
    script = [65, 65, 10, 66, 65, 65, 65, 300, 10]
    write_s2_positions(tmp_path, script)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    one = model.generate(torch.tensor([[7]]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert one[0, 1:].tolist() == [*script, T1_EOS]
    three = model.generate(
        torch.tensor([[7, 8, 9]]), max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    assert three[0, 3:].tolist() == script[2:6]
    gap = hf_logits(tmp_path, [1, 2])[1]
    assert gap[65].item() == pytest.approx(20.0, abs=1e-3)
    assert gap.abs().topk(2).values[1].item() < 1e-3


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        {"head_dim": 16, "num_key_value_heads": 6, "shards": 3},
    ],
)
def test_m2_loads_in_transformers(tmp_path: Path, config: dict[str, int]) -> None:
    write_m2_random_llama(tmp_path, seed=3, **config)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.max_position_embeddings == 64
    logits = hf_logits(tmp_path, list(b"The quick brown fox"))
    assert torch.isfinite(logits).all()
    assert len(set(logits.argmax(dim=-1).tolist())) > 5


def test_m2_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_m2_random_llama(tmp_path / name, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c
