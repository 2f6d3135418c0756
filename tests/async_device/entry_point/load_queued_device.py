"""What torch calls when it is imported in a child process: see `async_device.environment`.

The folder of this file is on PYTHONPATH there, and the folder above the package is not: it has names that a program may
want to import from elsewhere (`build`, `runtime`, ...).
"""

import importlib.util
import sys
from pathlib import Path

NAME = "async_device"


def load() -> None:
    """Import the package `async_device`, from where this file is."""
    if NAME in sys.modules:  # the program imports it, and it imports torch
        return
    package = Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location(
        NAME, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
