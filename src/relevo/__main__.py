"""`python -m relevo` is `relevo`."""

import sys

from relevo.cli import main

if __name__ == "__main__":
    sys.exit(main())
