"""``python -m corrnoise.papers.back_to_square_roots NAME``, the experiments from a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from corrnoise._progress import Bar

from . import GROUPS, expand, names, readme, reproduce


def main(arguments: list[str] | None = None) -> int:
    """Run what the arguments ask for, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m corrnoise.papers.back_to_square_roots", description=__doc__
    )
    parser.add_argument("name", nargs="?", choices=(*names(), *GROUPS))
    parser.add_argument("--list", action="store_true", help="the names, and nothing else")
    parser.add_argument("--smoke", action="store_true", help="a small size that takes seconds")
    parser.add_argument("--out", type=Path, default=Path("reproduced"), metavar="DIR")
    parser.add_argument("--json", action="store_true", help="print the numbers")
    parser.add_argument(
        "--readme", action="store_true", help="write README.md in DIR from the results there"
    )
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join((*names(), *GROUPS)))
        return 0
    if options.name is None and not options.readme:
        parser.error("a name, --list or --readme is needed")
    for name in expand(options.name) if options.name else ():
        with Bar(name) as progress:
            result = reproduce(name, smoke=options.smoke, folder=options.out, progress=progress)
        print(
            json.dumps(result) if options.json else f"{name}: {result['seconds']:.1f} s",
            flush=True,
        )
    if options.readme:
        readme.write(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
