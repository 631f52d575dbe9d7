"""`python -m hsdaemon` is `hs-extract`."""

import sys

from hsdaemon.cli import main

if __name__ == "__main__":
    sys.exit(main())
