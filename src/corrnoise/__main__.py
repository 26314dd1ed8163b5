"""``python -m corrnoise`` is the command line."""

import sys

from corrnoise.cli import main

sys.exit(main())
