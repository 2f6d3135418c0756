"""`python -m unisono` is the command `unisono`."""

import sys

from unisono.cli import main

sys.exit(main())
