"""`python -m fp4ward` is the command `fp4ward`."""

import sys

from fp4ward.cli import main

if __name__ == "__main__":
    sys.exit(main())
