"""What Python imports when a process starts with this folder on PYTHONPATH: the processes that tests start.

The folder above is not on that path: it has names that a program may want to import from elsewhere.
"""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("platforms.simulated", Path(__file__).parents[1] / "simulated.py")
assert _spec is not None
assert _spec.loader is not None
_simulated = sys.modules["platforms.simulated"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_simulated)
_simulated.begin()
