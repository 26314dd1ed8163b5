"""``python -m corrnoise`` is the command line."""

import sys

from corrnoise.apps.cli import main

sys.exit(main())
