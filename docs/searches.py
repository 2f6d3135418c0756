"""Ask the search of the built site: `make docs` runs it last. Each search has to find its page among its first hits.

The site's own search runs, as in a browser, by an engine for JavaScript (mini-racer). Before that the site is told
what the builder has no option for: its search has Chinese words too, and which pages are Chinese.
"""

import json
import sys
from pathlib import Path
from typing import Any

from py_mini_racer import MiniRacer

SITE = Path(__file__).parent.parent / "site"
NUM_HITS = 3  # of which one has to be on the page
# What people search for, and the page with the answer.
SEARCHES = {
    "batch norm": "batch-norm-and-dropout",
    "resume": "save-and-resume",
    "checkpoint": "save-and-resume",
    "learning rate": "two-devices",
    "mixed precision": "two-devices",
    "gradient accumulation": "two-devices",
    "out of memory": "out-of-memory",
    "kaggle": "notebook",
    "slurm": "slurm",
    "uneven gpus": "shares",
    "lstm hidden state": "batch-dimension",
    "gather scalar": "errors",
}


def finish() -> None:
    """Have the search divide Chinese text into words, and Chinese pages say that they are Chinese."""
    path = SITE / "search.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["config"]["lang"] = ["en", "zh"]
    path.write_text(json.dumps(index, ensure_ascii=False), encoding="utf-8")
    for page in SITE.glob("*.zh-CN.html"):
        page.write_text(page.read_text(encoding="utf-8").replace('<html lang="en"', '<html lang="zh-CN"', 1), "utf-8")


def hits(searches: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the first entries of the index that the site's search finds."""
    index = json.loads((SITE / "search.json").read_text(encoding="utf-8"))
    (worker,) = (SITE / "assets" / "javascripts" / "workers").glob("search.*.js")
    found = {}
    with MiniRacer() as engine:
        engine.eval("var said = [], self = {postMessage: message => said.push(message)}")
        engine.eval(worker.read_text(encoding="utf-8"))
        engine.eval(f"self.onmessage({{data: {{type: 0, data: {json.dumps(index)}}}}}); said")  # 0: make the index
        for words in searches:
            engine.eval("said = []")
            engine.eval(f"self.onmessage({{data: {{type: 2, data: {{input: {json.dumps(words)}}}}}}})")  # 2: search
            items = json.loads(str(engine.eval("JSON.stringify(said[0].data.items)")))
            found[words] = [index["items"][item["id"]] for item in items[:NUM_HITS]]
    return found


def main() -> int:
    """Print what is found, and return how many searches do not find their page."""
    finish()
    num_missing = 0
    for words, entries in hits([*SEARCHES]).items():
        page = SEARCHES[words]
        is_found = any(entry["location"].partition("#")[0] == f"{page}.html" for entry in entries)
        num_missing += not is_found
        titles = " / ".join(f"{entry['location']}: {entry['title']}" for entry in entries) or "nothing"
        print(f"{words}: {titles}" + ("" if is_found else f"   <- {page}.html is not among the first {NUM_HITS}"))
    return num_missing


if __name__ == "__main__":
    sys.exit(bool(main()))
