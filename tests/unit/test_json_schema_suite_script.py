"""The script that runs the public suite of JSON schemas counts what it should."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from source_tree import REPO


def load_script() -> ModuleType:
    name = "script_json_schema_suite"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, REPO / "scripts/json_schema_suite.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


suite = load_script()
PERSON = {
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def tally(schema: object, *tests: tuple[object, bool], draft: str = "draft2020-12") -> str:
    group = {
        "description": "a schema",
        "schema": schema,
        "tests": [{"description": "it", "data": data, "valid": valid} for data, valid in tests],
    }
    path = suite.SchemaPath(suite.bytes_vocabulary())
    return str(suite.try_group(path, draft, "file.json", group))


def test_instances_that_are_let_through_as_they_should_be() -> None:
    tests = (
        ({"name": "Zoë", "age": 3}, True),
        ({"age": 3, "name": "another order"}, True),
        ({"name": "x"}, False),
        ({"age": "3", "name": "x"}, False),
    )
    assert tally(PERSON, *tests) == "4 right, 0 refused by name, 0 narrower, 0 wrong"


def test_an_instance_that_is_let_through_though_invalid_is_wrong() -> None:
    assert tally({"type": "integer"}, (1, False)).endswith(" 1 wrong")


def test_an_instance_that_is_kept_out_though_valid_is_wrong() -> None:
    assert tally({"type": "integer"}, ("1", True)).endswith(" 1 wrong")


def test_a_refused_schema_counts_with_all_its_instances() -> None:
    found = tally({"not": {"type": "integer"}}, (1, False), ("1", True))
    assert found == "0 right, 2 refused by name, 0 narrower, 0 wrong"


@pytest.mark.parametrize(
    ("schema", "instance"),
    [
        ({"type": "integer"}, 1.0),
        ({"enum": [[1]]}, [1.0]),
        ({"format": "ipv4"}, "127.0.0.0.1"),
    ],
)
def test_rules_of_generation_make_it_narrower(schema: object, instance: object) -> None:
    assert tally(schema, (instance, True)).endswith(" 1 narrower, 0 wrong")


def test_keywords_beside_a_reference_are_heeded_in_every_draft() -> None:
    schema = {"$defs": {"list": {"type": "array"}}, "$ref": "#/$defs/list", "maxItems": 1}
    assert tally(schema, ([1, 2], False)).startswith("1 right")
    schema = {"definitions": {"list": {"type": "array"}}, "items": {"$ref": "#/definitions/list"}}
    schema["items"] = {"$ref": "#/definitions/list", "maxItems": 1}
    assert tally(schema, ([[1, 2]], True), draft="draft7").endswith(" 1 narrower, 0 wrong")
    assert tally(schema, ([[1, 2]], True)).endswith(" 0 narrower, 1 wrong")


def write_suite(folder: Path, valid: bool) -> None:
    group = {
        "description": "integers",
        "schema": {"type": "integer"},
        "tests": [{"description": "one", "data": 1, "valid": valid}],
    }
    for draft in suite.DRAFTS:
        (folder / draft).mkdir()
        (folder / draft / "type.json").write_text(json.dumps([group]))


@pytest.mark.parametrize(("valid", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_says_whether_anything_is_wrong(
    valid: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_suite(tmp_path, valid)
    monkeypatch.setattr(sys, "argv", ["json_schema_suite.py", str(tmp_path)])
    assert suite.main() == code


def test_a_folder_without_the_suite_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["json_schema_suite.py", str(tmp_path)])
    with pytest.raises(FileNotFoundError, match="no tests"):
        suite.main()
