"""`dspark-ray`: reads the command line and hands over to the command's own module, which is imported only then."""

import sys
from collections.abc import Sequence
from importlib import import_module

from pydantic import ValidationError

from dspark_ray.cli.arguments import build_parser
from dspark_ray.errors import DSparkError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 where a check failed, 2 for what the user must mend."""
    args = build_parser().parse_args(argv)
    try:
        return int(import_module(args.module).run(args))
    except ValidationError as error:
        for detail in error.errors():
            place = ".".join(map(str, detail["loc"])) or "configuration"
            print(f"dspark-ray: error: {place}: {detail['msg']}", file=sys.stderr)
    except (DSparkError, OSError) as error:
        print(f"dspark-ray: error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 2
