"""Programs of their own: a script in a fresh interpreter, with warnings as errors."""

import subprocess
import sys
import textwrap


def run_script(script: str, timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
