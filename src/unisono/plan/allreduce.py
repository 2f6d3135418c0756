"""The seconds of an all-reduce by the alpha-beta model: ring, tree, and two levels.

In all of them b bytes are summed over n devices; alpha is the latency and beta the bandwidth of the links in use (of
the slowest, if a message crosses several). The time of the additions is neglected. No all-reduce needs less than
2 (n - 1) / n * b / beta (Patarasuk & Yuan 2009), or fewer than log2(n) steps.

Sources:
    Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in MPICH", Int. J. of High
        Performance Computing Applications 19, 2005.
    Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. of Parallel and
        Distributed Computing 69, 2009.
    Sanders, Speck & Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing
        35, 2009.
    NCCL, src/graph/tuning.cc: how that library predicts its own ring and trees over two kinds of links.
    Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", arXiv:1706.02677, 2017, section 4.
"""

import math
from collections.abc import Callable

from unisono.plan.links import Cluster, Link

AllReduceTime = Callable[[Cluster, int, float], float]


def ring(cluster: Cluster, num_devices: int, num_bytes: float) -> float:
    """Return the seconds of one ring through all devices, which enters and leaves each machine once.

    2 (n - 1) alpha + 2 (n - 1) / n * b / beta: a reduce-scatter and an all-gather, in each of which every device sends
    n - 1 pieces of b / n bytes (Patarasuk & Yuan 2009). On m machines, 2 (m - 1) of the steps of a piece have the
    latency between machines, and the others that inside one (NCCL); the slowest link limits the bandwidth.
    """
    steps = 2 * (num_devices - 1)
    steps_between = 2 * (cluster.num_machines(num_devices) - 1)
    latency_s = (steps - steps_between) * cluster.inside.latency_s + steps_between * cluster.between.latency_s
    return latency_s + steps / num_devices * num_bytes / cluster.slowest_bytes_per_s(num_devices)


def tree(cluster: Cluster, num_devices: int, num_bytes: float) -> float:
    """Return the seconds of a double binary tree.

    2 log2(n) alpha + 2 b / beta: half of the bytes go up and down one binary tree, half another one whose inner nodes
    are the first one's leaves, so that every link is used in both directions (Sanders et al. 2009). The trees inside
    the machines are connected to a tree of machines, so 2 log2(m) of the steps are between machines. The time to fill
    the pipeline, which depends on the size of the chunks, is neglected, as in NCCL.
    """
    if num_devices == 1:
        return 0.0
    steps_inside = 2 * _levels(cluster.devices_inside(num_devices))
    steps_between = 2 * _levels(cluster.num_machines(num_devices))
    latency_s = steps_inside * cluster.inside.latency_s + steps_between * cluster.between.latency_s
    return latency_s + 2 * num_bytes / cluster.slowest_bytes_per_s(num_devices)


def two_level(cluster: Cluster, num_devices: int, num_bytes: float) -> float:
    """Return the seconds of an all-reduce inside each machine and between the machines.

    A reduce-scatter inside, an all-reduce between the machines, an all-gather inside (Goyal et al. 2017, who reduce and
    broadcast). Inside it is a ring. Between the machines, whose devices send their parts at the same time over a shared
    link, it is a ring or recursive halving and doubling, whichever is faster.
    """
    num_inside, num_machines = cluster.devices_inside(num_devices), cluster.num_machines(num_devices)
    between_s = min(
        _flat_ring(cluster.between, num_machines, num_bytes), halving_doubling(cluster.between, num_machines, num_bytes)
    )
    return _flat_ring(cluster.inside, num_inside, num_bytes) + between_s


def halving_doubling(link: Link, num_devices: int, num_bytes: float) -> float:
    """Return the seconds of recursive halving and doubling over equal links.

    2 log2(n) alpha + 2 (n - 1) / n * b / beta: partners exchange halves, then quarters, and so on, and back again
    (Rabenseifner's algorithm; Thakur et al. 2005, section 4.5). If n is no power of two, the devices beyond the largest
    power of two first send all their bytes to others, and receive the sums at the end: 2 (alpha + b / beta) more.
    """
    levels = num_devices.bit_length() - 1
    steps_s = 2 * levels * link.latency_s
    paired = 1 << levels
    folding_s = 0.0 if paired == num_devices else 2 * (link.latency_s + num_bytes / link.bandwidth_bytes_per_s)
    return steps_s + 2 * (paired - 1) / paired * num_bytes / link.bandwidth_bytes_per_s + folding_s


ALGORITHMS: dict[str, AllReduceTime] = {"ring": ring, "tree": tree, "two-level": two_level}


def _flat_ring(link: Link, num_devices: int, num_bytes: float) -> float:
    return ring(Cluster(link, link, num_devices), num_devices, num_bytes)


def _levels(num_devices: int) -> int:
    return math.ceil(math.log2(num_devices))
