"""`python -m dyncp` is the same as `dyncp`."""

import sys

from dyncp.cli import main

if __name__ == "__main__":
    sys.exit(main())
