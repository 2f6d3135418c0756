import signal
import sys

from mutants.command import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it stops as with Ctrl-C
    sys.exit(main())
