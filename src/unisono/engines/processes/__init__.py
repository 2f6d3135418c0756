"""The engine that runs each replica but the first in a worker process."""
