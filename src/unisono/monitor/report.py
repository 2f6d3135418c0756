"""The text of `unisono devices`, in ASCII."""

from collections.abc import Iterator, Sequence

from unisono.monitor.cpu import Cpu
from unisono.monitor.inventory import Accelerator, DeviceLink, Inventory

_INDENT = "  "
_PCI_ORDER = "PCI_BUS_ID"


def printable(text: str) -> str:
    """Return a text of other programs', or of the user's, in ASCII, without what a terminal would take for a command.

    >>> printable("Net\x1b[2J")
    'Net?[2J'
    """
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in text)


def gib(num_bytes: float) -> str:
    """Return a size in GiB."""
    return f"{num_bytes / 2**30:.1f} GiB"


def lines_of(inventory: Inventory) -> list[str]:
    """Return the report, one fact a line."""
    lines = [*_accelerators(inventory), "", *_cpu(inventory.cpu)]
    return [printable(line) for line in lines]  # variables and names of devices may have any letters


def _accelerators(inventory: Inventory) -> Iterator[str]:
    found = inventory.accelerators
    if not found:
        yield "accelerators: none that torch can use"
    in_pci_order = sorted(each.pci for each in found if each.pci is not None)
    for accelerator in found:
        yield from _accelerator(accelerator, in_pci_order)
    if inventory.driver is not None:
        yield f"driver {inventory.driver}" + _if(inventory.cuda, "; torch is built for CUDA {}")
    if inventory.gpus_unread:
        yield f"driver, load and processes: unknown, {inventory.gpus_unread}"
    seen = [accelerator.gpu for accelerator in found]
    if hidden := [f"{gpu.number} ({gpu.name})" for gpu in inventory.gpus if gpu not in seen]:
        yield f"GPUs that this process does not see: {', '.join(hidden)}"
    yield from _numbering(inventory)
    if inventory.links:
        yield "copies between accelerators:"
        yield from (_INDENT + _link(link) for link in inventory.links)
    if inventory.imbalance:
        yield f"warning: {inventory.imbalance}"
    if any(each.is_free is not None for each in found):
        yield f"free now: {', '.join(each.device for each in found if each.is_free) or 'none'}"


def _accelerator(of: Accelerator, in_pci_order: Sequence[str]) -> Iterator[str]:
    yield of.device + _if(of.name, ": {}")
    if of.problem:
        yield f"{_INDENT}cannot be used: {of.problem}"
        return
    if of.memory_bytes is not None:
        yield f"{_INDENT}memory: {gib(of.memory_bytes)}{_if_gib(of.free_bytes, ', {} of it free')}"
    if of.cores is not None:
        yield f"{_INDENT}cores: {of.cores} multiprocessors"
    if of.pci is not None:
        number = _if(of.gpu and of.gpu.number, "; GPU {} in nvidia-smi")
        yield f"{_INDENT}PCI address: {of.pci}, number {in_pci_order.index(of.pci)} in PCI order{number}"
    if of.is_free is not None:
        load = _if(of.gpu and of.gpu.load, ", load {:.0%}")
        used_by = ", ".join(f"process {process.pid}" for process in of.gpu.processes) if of.gpu else ""
        yield f"{_INDENT}now: {'free' if of.is_free else 'busy'}{load}{_if(used_by or None, ', used by {}')}"


def _numbering(inventory: Inventory) -> Iterator[str]:
    """Say which GPUs became which numbers, and where nvidia-smi has other numbers."""
    given = inventory.visible_devices
    if given is not None:
        # CUDA takes the entries in order, up to the first that names no GPU; if one is named twice, it takes none.
        entries = [entry.strip() for entry in given.partition("=")[2].split(",")]
        names = [each.device for each in inventory.accelerators if each.device.startswith("cuda")]
        seen = [f"{entry} is {name}" for entry, name in zip(entries, names, strict=False)]
        yield f"{given}: {', '.join(seen) or 'no GPU is seen'}"
        if seen and len(seen) < len(entries):
            yield f"{entries[len(seen)] or 'an empty entry'} is not a GPU, so CUDA ignores it and all after it"
    addresses = [each.pci for each in inventory.accelerators if each.pci is not None]
    if len(addresses) > 1 and inventory.device_order != _PCI_ORDER:
        here = "which is the same here"
        if addresses != sorted(addresses):
            here = f"so their numbers differ here. CUDA_DEVICE_ORDER={_PCI_ORDER} makes them the same"
        yield f"CUDA numbers the fastest GPU first, and nvidia-smi uses PCI order, {here}"


def _link(link: DeviceLink) -> str:
    facts = {True: ["peer access"], False: ["no peer access"], None: []}[link.peer_access]
    if link.problem is not None:
        facts.append(f"cannot copy: {link.problem}")
    else:
        facts.append("not measured" if link.bytes_per_s is None else f"{link.bytes_per_s / 1e9:.3g} GB/s")
    if link.arrives is False:
        facts.append("through the host, because direct copies arrive damaged")
    return f"{link.source} to {link.target}: {', '.join(facts)}"


def _cpu(cpu: Cpu) -> Iterator[str]:
    yield f"CPU: {cpu.processor}"
    yield f"{_INDENT}cores: {cpu.allowed} of {cpu.cores}{_if(cpu.physical, ' ({} physical)')}"
    limits = [_if(cpu.cgroup_cores, "{:g} cores"), _if_gib(cpu.cgroup_memory_bytes, "{}")]
    yield f"{_INDENT}cgroup limits: {', '.join(filter(None, limits)) or 'none'}"
    variable = "not set" if cpu.omp_num_threads is None else cpu.omp_num_threads
    threads, cores = cpu.intra_op_threads, cpu.usable_cores
    yield f"{_INDENT}intra-op threads: {threads} (OMP_NUM_THREADS: {variable})"
    if threads > cores:
        yield (
            f"{_INDENT}warning: {threads} intra-op threads on {cores} cores wait for each other. Set "
            f"OMP_NUM_THREADS={cores}"
        )
    if cpu.memory_bytes is not None:
        yield f"{_INDENT}memory: {gib(cpu.memory_bytes)}{_if_gib(cpu.available_bytes, ', {} of it available')}"
    for number, cores_of_node in cpu.numa_nodes.items():
        yield f"{_INDENT}NUMA node {number}: cores {cores_of_node or 'none'}"


def _if(figure: object, text: str) -> str:
    """Return a text with a figure in it; "" if the figure is not known."""
    return "" if figure is None else text.format(figure)


def _if_gib(num_bytes: float | None, text: str) -> str:
    return "" if num_bytes is None else text.format(gib(num_bytes))
