"""Lines of code by part, and the change since the last tag.

    make size

Counts lines that are neither blank nor whole-line comments, of files that git tracks.
"""

import subprocess
from collections import Counter

PARTS = ("protos", "engine_core", "kernels", "services/runtime", "services/transport",
         "services/tokenizer", "services/scheduler", "services/executor", "services/cli",
         "client", "examples", "bench", "scripts", "tests")  # fmt: skip
SUFFIXES = (".py", ".cpp", ".h", ".go", ".proto")


def git(*arguments: str) -> str:
    """The output of a git command; empty when it fails."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def count(revision: str) -> Counter[str]:
    """Lines by part at a revision."""
    lines: Counter[str] = Counter()
    for path in git("ls-tree", "-r", "--name-only", revision).splitlines():
        part = next((part for part in PARTS if path.startswith(part + "/")), None)
        if part and path.endswith(SUFFIXES):
            text = git("show", f"{revision}:{path}")
            code = (line.strip() for line in text.splitlines())
            lines[part] += sum(1 for line in code if line and not line.startswith(("#", "//")))
    return lines


def main() -> None:
    """Print the table."""
    tag = git("describe", "--tags", "--abbrev=0").strip()
    now, before = count("HEAD"), count(tag) if tag else Counter()
    print(f"{'part':<20} {'lines':>7}" + (f" {'since ' + tag:>14}" if tag else ""))
    for part in (*PARTS, "total"):
        new = now.total() if part == "total" else now[part]
        old = before.total() if part == "total" else before[part]
        print(f"{part:<20} {new:>7}" + (f" {new - old:>+14}" if tag else ""))


if __name__ == "__main__":
    main()
