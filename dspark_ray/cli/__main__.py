"""`python -m dspark_ray.cli`."""

import sys

from dspark_ray.cli import main

if __name__ == "__main__":
    sys.exit(main())
