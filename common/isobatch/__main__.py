"""`python -m isobatch` is the command `isobatch`."""

import sys

from isobatch.cli import main

sys.exit(main())
