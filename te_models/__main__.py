"""`python -m te_models` is the command line."""

import sys

from te_models.cli import main

sys.exit(main())
