"""Requirements of pyproject.toml, one a line, for the image's layers below the sources.

requirements.py build                      what building the wheel needs
requirements.py run [--without NAME]...    what the engine needs
requirements.py EXTRA                      what an optional group adds
"""

import re
import sys
import tomllib
from pathlib import Path


def main(part: str, arguments: list[str]) -> None:
    """Write the list to stdout."""
    facts = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    project = facts["project"]
    if part == "build":
        requirements = facts["build-system"]["requires"]
    elif part == "run":
        requirements = project["dependencies"]
    else:
        requirements = project["optional-dependencies"][part]
    left_out = {name for name in arguments if name != "--without"}
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)
        if name is None or name[0] not in left_out:
            sys.stdout.write(requirement + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
