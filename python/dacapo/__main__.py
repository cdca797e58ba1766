"""The command line: `python -m dacapo run -p "…"`."""

import signal
import sys

from ._dacapo import main

if __name__ == "__main__":
    # The command line handles signals itself; Python's handler would only be noticed after it returns.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main(["dacapo", *sys.argv[1:]]))
