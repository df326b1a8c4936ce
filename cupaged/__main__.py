"""`python -m cupaged` is the command `cupaged`."""

import sys

from cupaged.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
