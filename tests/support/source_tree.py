"""The product's Python sources, and what a source file imports, for the tests that read code."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPO = Path(__file__).parents[2]
PACKAGE_FOLDERS = ("client", "engine_core", "kernels", "services")
PROGRAM_FOLDERS = ("bench", "examples", "scripts")


@dataclass(frozen=True, slots=True)
class Source:
    """One file: its dotted name below `triptych` (or below the repository) and its syntax tree."""

    path: Path
    tree: ast.Module

    @property
    def name(self) -> str:
        parts = self.path.relative_to(REPO).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def shown(self) -> str:
        return str(self.path.relative_to(REPO))

    def imports(self) -> Iterator[str]:
        """Every imported name in full, also those in functions and of `import_module("...")`."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.shown}:{node.lineno}: write the import in full"
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Call) and called(node).rpartition(".")[2] in (
                "import_module",
                "__import__",
            ):
                first = node.args[0] if node.args else None
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield first.value


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    """All sources below the given top-level folders."""
    paths = sorted(path for folder in folders for path in (REPO / folder).rglob("*.py"))
    return tuple(Source(path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths)


def called(call: ast.Call) -> str:
    """The dotted name of what is called; "" where it is not a plain name."""
    return dotted(call.func)


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def within(name: str, package: str) -> bool:
    """Whether a dotted name is the package or something in it."""
    return name == package or name.startswith(package + ".")
