"""No code on the wire, none in model files: what would run foreign code is not in the tree.

Reads every source outside tests/. The behaviour itself (marker files that must not appear) is
tested where the sockets, the loaders and the chat template are.
"""

import ast
from collections.abc import Iterator

from source_tree import PACKAGE_FOLDERS, PROGRAM_FOLDERS, Source, called, dotted, sources, within

BANNED_MODULES = ("pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib",
                  "multiprocessing", "xmlrpc", "concurrent.futures.process")  # fmt: skip
BANNED_ATTRIBUTES = {"recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized"}
BANNED_NAMES = {
    "torch.load": "pickle",
    "torch.hub": "downloads and runs code",
    "yaml.load": "builds any object: yaml.safe_load",
    "yaml.unsafe_load": "builds any object: yaml.safe_load",
    "jinja2.Environment": "jinja2.sandbox.ImmutableSandboxedEnvironment",
    "jinja2.environment": "jinja2.sandbox.ImmutableSandboxedEnvironment",
    "jinja2.nativetypes": "evaluates its output",
    "os.system": "a shell",
    "os.popen": "a shell",
}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "Template", "jinja2.Template"}
BANNED_KEYWORDS = {"trust_remote_code", "allow_pickle", "shell"}


def safe_yaml_loads(tree: ast.Module) -> Iterator[ast.expr]:
    """The `yaml.load` of calls whose loader is a class of this file made from yaml.SafeLoader."""
    safe = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "yaml.SafeLoader" in map(dotted, node.bases)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) == "yaml.load":
            loaders = [*node.args[1:], *(keyword.value for keyword in node.keywords)]
            if loaders and all(dotted(loader) in safe for loader in loaders):
                yield node.func


def faults(source: Source) -> Iterator[str]:
    for name in source.imports():
        if any(within(name, module) for module in BANNED_MODULES):
            yield f"imports {name}"
        if any(within(name, banned) for banned in BANNED_NAMES):
            yield f"imports {name}"
        if name.startswith("jinja2.sandbox.") and not name.endswith(
            "ImmutableSandboxedEnvironment"
        ):
            yield f"imports {name}"
    allowed = list(safe_yaml_loads(source.tree))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node not in allowed:
            if node.attr in BANNED_ATTRIBUTES:
                yield f"line {node.lineno}: {node.attr}"
            if dotted(node) in BANNED_NAMES:
                yield f"line {node.lineno}: {dotted(node)}: {BANNED_NAMES[dotted(node)]}"
        elif isinstance(node, ast.Call):
            if called(node) in BANNED_CALLS:
                yield f"line {node.lineno}: calls {called(node)}"
            for keyword in node.keywords:
                if keyword.arg in BANNED_KEYWORDS:
                    yield f"line {node.lineno}: passes {keyword.arg}"


def test_the_tree_holds_nothing_that_runs_foreign_code() -> None:
    found = [
        f"{source.shown}: {fault}"
        for source in sources(*PACKAGE_FOLDERS, *PROGRAM_FOLDERS)
        for fault in faults(source)
    ]
    assert not found, "\n".join(found)


def test_the_search_finds_what_it_looks_for() -> None:
    program = "\n".join(
        [
            "import pickle",
            "from jinja2 import Environment",
            "from jinja2.sandbox import SandboxedEnvironment",
            "torch.load(path)",
            "socket.recv_pyobj()",
            "eval(text)",
            "load(name, trust_remote_code=True)",
        ]
    )
    path = sources("services")[0].path
    assert len(list(faults(Source(path, ast.parse(program))))) == 7
    sound = "from jinja2.sandbox import ImmutableSandboxedEnvironment\nmodel.eval()\nre.compile(x)"
    assert not list(faults(Source(path, ast.parse(sound))))
