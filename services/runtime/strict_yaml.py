"""YAML without its surprises: a key that stands twice, or is not text, is refused."""

from typing import TextIO

import yaml


def strict_yaml(file: TextIO) -> object:
    """The document in a file. Raises yaml.YAMLError, UnicodeDecodeError."""
    content: object = yaml.load(file, StrictLoader)
    return content


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice, which YAML's own loader lets the later one win."""


def _unique_mapping(loader: StrictLoader, node: yaml.MappingNode) -> dict[object, object]:
    mapping: dict[object, object] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.MarkedYAMLError(
                problem=f"key {key!r} is not text", problem_mark=node.start_mark
            )
        if key in mapping:
            raise yaml.MarkedYAMLError(
                problem=f"key {key!r} stands twice", problem_mark=key_node.start_mark
            )
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)
