"""The public JSON-Schema-Test-Suite through the engine's own path from a schema to masks.

    make schema-suite

Every schema goes the way of a request: the tokenizer's checks, the grammar that they write, the
matcher that the scheduler compiles of it, over the vocabulary of --model (without: over bytes).
Then every instance is put to the masks, token by token and to the end, compactly and with blanks,
with its names in every order (a few hundred at most): the order that is let through is the
schema's. An invalid instance must be kept out in all of them, with its letters escaped as well, in
long tokens and in short ones.

    right       the instance is let through if, and only if, it is valid
    refused     the schema is, with an error that names what is not supported
    narrower    a valid instance is not let through, by a rule of docs/structured-output.md: one
                spelling of numbers, formats that are kept, keywords heeded beside $ref
    wrong       anything else

Exit code 1 if anything is wrong, or if nothing is right.
"""

import argparse
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
from llguidance import LLMatcher

from triptych.engine_core.errors import RequestError
from triptych.services.runtime.model_files import resolve_model
from triptych.services.scheduler.grammar_compiler import VocabularyTables
from triptych.services.tokenizer.structured_output.compilation import check_compiles
from triptych.services.tokenizer.structured_output.refusal import Refused
from triptych.services.tokenizer.structured_output.wanted import wanted_grammar
from triptych.services.tokenizer.tokenizer import Tokenizer, load_tokenizer
from triptych.services.transport.vocabulary import Vocabulary
from triptych.v1 import common_pb2

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

DRAFTS = ("draft4", "draft6", "draft7", "draft2019-09", "draft2020-12")
MOST_ORDERS = 240
MOST_PERMUTED = 4  # names of one object
_SHOWN = 20


# ------------------------------------------ from a schema to what is let through


class SchemaPath:
    """The engine's way from a schema to masks over one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tables = VocabularyTables(vocabulary)
        special = {*vocabulary.special_token_ids, *vocabulary.eos_token_ids}
        self._ids = {
            token: token_id
            for token_id, token in enumerate(vocabulary.tokens)
            if token and token_id not in special
        }
        self._lengths = sorted({len(token) for token in self._ids}, reverse=True)

    def matcher(self, schema: Json) -> LLMatcher:
        """Raises RequestError where the engine refuses the schema."""
        grammar = wanted_grammar(common_pb2.StructuredOutput(json_schema=json.dumps(schema)))
        try:
            check_compiles(grammar)
        except Refused as refused:
            raise refused.named("json_schema") from refused
        return self._tables.compile(grammar)

    def lets_through(self, matcher: LLMatcher, text: str, *, longest: bool = True) -> bool:
        """Whether the masks let a text be said, and then the end; in the longest tokens that they
        allow, or the shortest."""
        rest = text.encode("utf-8", "surrogatepass")
        running = matcher.deep_copy()
        lengths = self._lengths if longest else self._lengths[::-1]
        while rest:
            if running.is_stopped():
                return False
            allowed = _mask(running)
            starts = (self._ids.get(rest[:length]) for length in lengths if length <= len(rest))
            token_id = next((each for each in starts if each is not None and allowed(each)), None)
            if token_id is None:
                return False
            if not running.consume_token(token_id):
                raise AssertionError(f"refused behind its mask: {running.get_error()}")
            rest = rest[len(self._tables.tokens[token_id]) :]
        return running.is_stopped() or _mask(running)(self._tables.eos_token_id)


def _mask(matcher: LLMatcher) -> Callable[[int], bool]:
    """Whether a token may follow."""
    words = np.frombuffer(matcher.compute_bitmask(), np.uint32)
    if matcher.is_error():
        raise AssertionError(f"no mask: {matcher.get_error()}")
    return lambda token_id: bool(words[token_id >> 5] >> (token_id & 31) & 1)


def bytes_vocabulary() -> Vocabulary:
    """256 tokens of a byte each, and one for the end."""
    return Vocabulary((*(bytes([value]) for value in range(256)), b"<|end|>"), (256,), (256,))


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """A model's tokens."""
    return Vocabulary(
        tuple(map(tokenizer.token_bytes, range(tokenizer.vocabulary_size))),
        tuple(sorted(tokenizer.special_token_ids)),
        tuple(tokenizer.eos_token_ids),
    )


# ------------------------------------------ how an instance can be written


def orders(instance: Json) -> Iterator[Json]:
    """The instance with its names in other orders, at every depth; the given one first."""
    match instance:
        case dict():
            names = list(instance)
            if len(names) <= MOST_PERMUTED:
                sequences = [list(each) for each in itertools.permutations(names)]
            else:
                sequences = [names, names[::-1], sorted(names)]
            for sequence in sequences:
                below = [list(orders(instance[name])) for name in sequence]
                for values in itertools.product(*below):
                    yield dict(zip(sequence, values, strict=True))
        case list():
            for items in itertools.product(*(list(orders(item)) for item in instance)):
                yield list(items)
        case _:
            yield instance


def compact(instance: Json) -> str:
    """Without a blank."""
    return json.dumps(instance, ensure_ascii=False, separators=(",", ":"))


def spaced(instance: Json) -> str:
    """A blank behind every comma and colon."""
    return json.dumps(instance, ensure_ascii=False)


def escaped(instance: Json) -> str:
    """With every letter beyond ASCII as an escape."""
    return json.dumps(instance)


def is_let_through(path: SchemaPath, matcher: LLMatcher, instance: Json) -> bool:
    """Whether some order of its names can be said, compactly and spaced."""
    return any(
        path.lets_through(matcher, compact(each)) and path.lets_through(matcher, spaced(each))
        for each in itertools.islice(orders(instance), MOST_ORDERS)
    )


def is_kept_out(path: SchemaPath, matcher: LLMatcher, instance: Json) -> bool:
    """Whether no way to write it can be said."""
    return not any(
        path.lets_through(matcher, text, longest=longest)
        for longest in (True, False)
        for each in itertools.islice(orders(instance), MOST_ORDERS)
        for text in {compact(each), spaced(each), escaped(each)}
    )


# ------------------------------------------ why a valid one is not let through


def whole_numbers(instance: Json) -> Json:
    """1.0 as 1: how generated numbers of that value are spelled."""
    match instance:
        case dict():
            return {name: whole_numbers(value) for name, value in instance.items()}
        case list():
            return [whole_numbers(item) for item in instance]
        case float() if instance.is_integer():
            return int(instance)
    return instance


def without_formats(schema: Json) -> Json:
    """The schema with `format` as an annotation."""
    match schema:
        case dict():
            return {
                name: without_formats(value)
                for name, value in schema.items()
                if not (name == "format" and isinstance(value, str))
            }
        case list():
            return [without_formats(each) for each in schema]
    return schema


def references_alone(schema: Json) -> Json:
    """The schema as drafts before 2019-09 read it: nothing beside a $ref counts."""
    match schema:
        case dict():
            if isinstance(schema.get("$ref"), str):
                return {"$ref": schema["$ref"]}
            return {name: references_alone(value) for name, value in schema.items()}
        case list():
            return [references_alone(each) for each in schema]
    return schema


def rule(
    path: SchemaPath, draft: str, schema: Json, matcher: LLMatcher, instance: Json
) -> str | None:
    """The rule that keeps a valid instance out; None if there is none."""
    if is_let_through(path, matcher, whole_numbers(instance)):
        return "one spelling of numbers"
    variants = [("formats are kept", without_formats(schema))]
    if draft in ("draft4", "draft6", "draft7"):
        variants.append(("keywords beside $ref are heeded", references_alone(schema)))
    for name, variant in variants:
        if variant != schema:
            try:
                wider = path.matcher(variant)
            except RequestError:
                continue
            if is_let_through(path, wider, instance):
                return name
    return None


# ------------------------------------------ the suite


@dataclass(slots=True)
class Tally:
    """Instances by what became of them. Refused ones are counted by what the error says."""

    right: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    narrower: list[tuple[str, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Count another one's too."""
        self.right += other.right
        self.refused += other.refused
        self.narrower += other.narrower
        self.wrong += other.wrong

    def __str__(self) -> str:
        return (
            f"{self.right} right, {self.refused.total()} refused by name,"
            f" {len(self.narrower)} narrower, {len(self.wrong)} wrong"
        )


def try_group(path: SchemaPath, draft: str, where: str, group: dict[str, Json]) -> Tally:
    """One schema of the suite and its instances."""
    tally, tests = Tally(), group["tests"]
    assert isinstance(tests, list)
    where = f"{where} {group['description']}"
    try:
        matcher = path.matcher(group["schema"])
    except RequestError as error:
        tally.refused[str(error)] += len(tests)
        return tally
    for test in tests:
        assert isinstance(test, dict)
        instance, what = test["data"], f"{where}: {test['description']}"
        if test["valid"]:
            good = is_let_through(path, matcher, instance)
        else:
            good = is_kept_out(path, matcher, instance)
        if good:
            tally.right += 1
        elif not test["valid"]:
            tally.wrong.append(f"{what}: let through though invalid: {compact(instance)}")
        elif why := rule(path, draft, group["schema"], matcher, instance):
            tally.narrower.append((why, f"{what}: {compact(instance)}"))
        else:
            tally.wrong.append(f"{what}: kept out though valid: {compact(instance)}")
    return tally


def try_draft(path: SchemaPath, suite: Path, draft: str) -> Tally:
    """All that a draft requires; raises FileNotFoundError where the suite has none of it."""
    files = sorted((suite / draft).glob("*.json"))
    if not files:
        raise FileNotFoundError(f"{suite / draft} has no tests")
    tally = Tally()
    for file in files:
        for group in json.loads(file.read_text(encoding="utf-8")):
            tally.add(try_group(path, draft, f"{draft}/{file.name}", group))
    return tally


def show(tally: Tally) -> None:
    """The reasons, wherever in a schema, and every instance that is not as the schema says."""
    reasons: Counter[str] = Counter()
    for error, count in tally.refused.items():
        reasons[re.sub(r" at #\S*", "", error.partition(": ")[2])] += count
    shown = reasons.most_common(_SHOWN)
    for reason, count in shown:
        print(f"  refused {count:4}  {reason[:150]}")
    rest = reasons.total() - sum(count for _, count in shown)
    if rest:
        print(f"  refused {rest:4}  for {len(reasons) - _SHOWN} other reasons")
    for why, what in sorted(tally.narrower):
        print(f"  narrower ({why}) {what[:200]}")
    for what in tally.wrong:
        print(f"  WRONG {what[:300]}")


def main() -> int:
    """0 if nothing is wrong and something is right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("suite", type=Path, help="its folder of tests, with draft4 and so on")
    parser.add_argument("--model", help="whose vocabulary to use; default: bytes")
    args = parser.parse_args()
    vocabulary = bytes_vocabulary()
    if args.model is not None:
        vocabulary = vocabulary_of(load_tokenizer(resolve_model(args.model)))
    path = SchemaPath(vocabulary)
    total = Tally()
    for draft in DRAFTS:
        tally = try_draft(path, args.suite, draft)
        print(f"{draft}: {tally}", flush=True)
        total.add(tally)
    show(total)
    print(f"schema suite: {total}")
    return 0 if total.right and not total.wrong else 1


if __name__ == "__main__":
    sys.exit(main())
