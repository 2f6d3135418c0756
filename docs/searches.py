"""Ask the search of the built site: `make docs` runs it last. Each search has to find its page among its first hits;
those of GUIDES in the very first.

The site's own search runs, as in a browser, by an engine for JavaScript (mini-racer). The Chinese pages are a site of
their own, whose search divides Chinese text into words. The table of behaviour has a filter of its own.
"""

import html
import json
import re
import sys
from pathlib import Path
from typing import Any

from py_mini_racer import MiniRacer

SITE = Path(__file__).parent.parent / "site"
NUM_HITS = 3  # of which one has to be on the page
# What people search for, and the page with the answer. These have it as the first hit.
GUIDES = {
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
    "speed": "benchmark",
    "performance": "benchmark",
    "slow": "profile",
    "requirements": "install",
    "memory": "out-of-memory",
    "verify": "verify",
    "batchnorm": "batch-norm-and-dropout",
    "two gpus": "two-devices",
    "nccl": "ranks",
    "deepspeed": "from-ddp",
    "load balancing": "shares",
    "install": "install",
    "run": "run",
}
# Other words for the same, and what else people ask.
ENGLISH = {
    "getting started": "index",
    "sync bn": "batch-norm-and-dropout",
    "dropout": "batch-norm-and-dropout",
    "save model": "save-and-resume",
    "state_dict": "save-and-resume",
    "optimizer state": "save-and-resume",
    "ema": "save-and-resume",
    "faster": "benchmark",
    "fsdp": "from-ddp",
    "api": "api-data-parallel",
    "rnn": "batch-dimension",
    "evaluate": "inference",
    "compile": "two-devices",
    "pytorch version": "install",
    "python version": "install",
    "gradients": "same-numbers",
    "multiple gpus": "two-devices",
    "multi gpu": "two-devices",
    "amp": "two-devices",
    "torch.compile": "two-devices",
    "freeze layers": "two-devices",
    "gradient clipping": "two-devices",
    "num_workers": "two-devices",
    "gradient penalty": "two-devices",
    "oom": "out-of-memory",
    "gradient checkpointing": "out-of-memory",
    "model too large": "boundaries",
    "nn.DataParallel slow": "from-data-parallel",
    "imbalance": "from-data-parallel",
    "CUDA_VISIBLE_DEVICES": "from-data-parallel",
    "DistributedDataParallel": "from-ddp",
    "lightning": "from-ddp",
    "huggingface": "trainer",
    "hidden state shape": "batch-dimension",
    "loss is a vector": "batch-dimension",
    "attention mask": "batch-dimension",
    "class weights": "batch-dimension",
    "variable length": "batch-dimension",
    "list of images": "batch-dimension",
    "evaluation": "inference",
    "validation": "inference",
    "wrong gradients": "verify",
    "deterministic": "same-numbers",
    "reproducible": "same-numbers",
    "hang": "failures",
    "crash": "failures",
    "gpu utilization": "profile",
    "multi node": "machines",
    "jupyter": "notebook",
    "colab": "notebook",
    "windows": "install",
    "cuda version": "install",
    "apple silicon": "compatibility",
    # Messages, as they are pasted.
    "RuntimeError: module must have its parameters and buffers on device cuda:0 (device_ids[0]) but found": "errors",
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices": "errors",
    "UserWarning: Was asked to gather along dimension 0, but all input tensors were scalars; will instead": "errors",
    "RuntimeError: Error(s) in loading state_dict": "errors",
    "grad can be implicitly created only for scalar outputs": "errors",
    "There is an imbalance between your GPUs. You may want to exclude GPU 1": "errors",
    "CUDA out of memory. Tried to allocate": "errors",
}
CHINESE = {
    "安装": "install",
    "镜像": "install",
    "清华源": "install",
    "conda": "install",
    "Windows": "install",
    "Accelerate": "index",
    "数据并行": "from-data-parallel",
    "nn.DataParallel": "from-data-parallel",
    "data_parallel": "from-data-parallel",
    "梯度": "from-data-parallel",
    "梯度累积": "from-data-parallel",
    "显存": "from-data-parallel",
    "主卡显存": "from-data-parallel",
    "负载不均衡": "from-data-parallel",
    "损失函数": "from-data-parallel",
    "标量": "from-data-parallel",
    "LSTM 隐藏状态": "from-data-parallel",
    "循环神经网络": "from-data-parallel",
    "学习率": "from-data-parallel",
    "批大小": "from-data-parallel",
    "batch size": "from-data-parallel",
    "同步BN": "from-data-parallel",
    "批归一化": "from-data-parallel",
    "module.": "from-data-parallel",
    "CUDA_VISIBLE_DEVICES": "from-data-parallel",
    "查看显卡占用": "from-data-parallel",
    "变慢": "from-data-parallel",
    "推理": "from-data-parallel",
    "性能": "from-data-parallel",
    "训练慢": "from-data-parallel",
    "梯度不一致": "verify",
    "结果不一致": "verify",
    "精度对不上": "verify",
    "验证": "verify",
    "verify": "verify",
    "不改代码": "run",
    "unisono run": "run",
    "差异": "differences",
    "DeepSpeed": "processes-and-errors",
    "断点续训": "processes-and-errors",
    "保存模型": "processes-and-errors",
    "加载权重": "processes-and-errors",
    "多卡": "processes-and-errors",
    "单机多卡": "processes-and-errors",
    "分布式训练": "processes-and-errors",
    "多进程": "processes-and-errors",
    "torchrun": "processes-and-errors",
    "DDP": "processes-and-errors",
    "Kaggle": "processes-and-errors",
    "混合精度": "processes-and-errors",
    "报错": "processes-and-errors",
    "显存不足": "processes-and-errors",
    "CUDA out of memory": "processes-and-errors",
    "卡死": "processes-and-errors",
    "Missing key(s) in state_dict": "processes-and-errors",
    "module must have its parameters and buffers on device": "processes-and-errors",
    "all input tensors were scalars": "processes-and-errors",
}


def hits(site: Path, searches: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Return for each search the first entries of the index that the site's search finds."""
    index = json.loads((site / "search.json").read_text(encoding="utf-8"))
    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.js")
    found = {}
    with MiniRacer() as engine:
        engine.eval("var said = [], self = {postMessage: message => said.push(message)}; 0")
        engine.eval(f"{worker.read_text(encoding='utf-8')}; 0")
        engine.eval(f"self.onmessage({{data: {{type: 0, data: {json.dumps(index)}}}}}); 0")  # 0: make the index
        for words in searches:
            engine.eval(f"said = []; self.onmessage({{data: {{type: 2, data: {{input: {json.dumps(words)}}}}}}}); 0")
            items = json.loads(str(engine.eval("JSON.stringify(said[0].data.items)")))
            found[words] = [index["items"][item["id"]] for item in items[:NUM_HITS]]
    return found


# Words for the filter of the table of behaviour, and a row that it leaves.
ROWS = {"different numbers of rows": "S5", "dropout": "N12", "ctrl-c": "F3", "resume": "T1", "sync_batch_norm": "N5"}


def rows_left(page: str, words: str) -> list[str]:
    """Return the rows of the built table of behaviour that its filter leaves for some words."""
    (table,) = re.findall(r'id="behaviour-filter".*?<tbody>(.*?)</tbody>', page, re.DOTALL)
    rows = [
        html.unescape(re.sub(r"<[^>]+>", "", row)).strip() for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
    ]
    (script,) = re.findall(r"<script>\n(// The filter of the table.*?)</script>", page, re.DOTALL)
    with MiniRacer() as engine:
        engine.eval(f"{script}; 0")
        left = [row for row in rows if engine.eval(f"shown({json.dumps(row)}, '', {json.dumps(words)}, '')")]
    return [row.split()[0] for row in left]


def main() -> int:
    """Print what is found, and return how many searches do not find their page."""
    num_missing = 0
    behaviour = (SITE / "behaviour.html").read_text(encoding="utf-8")
    for words, row in ROWS.items():
        left = rows_left(behaviour, words)
        is_found = row in left and len(left) < 50
        num_missing += not is_found
        print(f"{words}: rows {', '.join(left)}" + ("" if is_found else f"   <- {row} is not among a few"))
    for site, searches, most in ((SITE, GUIDES, 1), (SITE, ENGLISH, NUM_HITS), (SITE / "zh", CHINESE, NUM_HITS)):
        for words, entries in hits(site, [*searches]).items():
            page = f"{searches[words]}.html"
            is_found = any(entry["location"].partition("#")[0] == page for entry in entries[:most])
            num_missing += not is_found
            titles = " / ".join(f"{entry['location']}: {entry['title']}" for entry in entries) or "nothing"
            print(f"{words}: {titles}" + ("" if is_found else f"   <- {page} is not among the first {most}"))
    return num_missing


if __name__ == "__main__":
    sys.exit(bool(main()))
