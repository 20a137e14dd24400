"""`python -m kvjax`: the program `kvjax`."""

import sys

from kvjax.cli import main

sys.exit(main())
