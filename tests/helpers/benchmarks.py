"""Files that are not in a package, such as the scripts in benchmarks/, as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def benchmark(name: str) -> ModuleType:
    """Import `benchmarks/<name>.py`."""
    return import_file(BENCHMARKS / f"{name}.py", name)


def import_file(path: Path, name: str) -> ModuleType:
    """Import a file as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module
