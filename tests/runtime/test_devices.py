"""Names of devices and errors for missing ones; what differs between kinds of device; copies between accelerators."""

import contextlib
import re
from types import SimpleNamespace

import pytest
import torch

import unisono
from helpers.host_waits import noted_on_simulated_devices
from unisono import DataParallel
from unisono.runtime import devices, unequal_devices

CPU = torch.device("cpu")


def test_names_of_the_cpu(no_accelerators):
    """A1, A13: strings and torch.device, once for each replica; a list that names it does not fall back."""
    assert devices.resolve(["cpu", CPU, "cpu:0", torch.device("cpu", 0)]) == [CPU] * 4
    assert devices.resolve(("cpu",)) == [CPU]
    with pytest.raises(ValueError, match="there is no accelerator 0; this process sees no accelerator"):
        devices.resolve(["cpu", 0])


def test_names_of_accelerators(sim):
    """A1: None, ints, strings, torch.device; in the order given, and twice if given twice (A12); public as in torch."""
    assert devices.resolve(None) == sim
    assert devices.resolve([2, 0]) == [sim[2], sim[0]]
    assert devices.resolve(["sim:1", torch.device("sim", 3)]) == [sim[1], sim[3]]
    assert devices.resolve([0, "sim:0"]) == [sim[0]] * 2
    assert devices.resolve(range(2)) == sim[:2]
    assert devices.resolve(["cpu"] * 2) == [CPU] * 2
    assert devices.resolve(["sim", "sim:1"]) == sim[:2], "without a number: the current one, as with torch"
    assert [devices.public_id(device) for device in [*sim[:2], CPU]] == [0, 1, CPU]


@pytest.mark.parametrize(
    ("device_ids", "error", "message"),
    [
        ([], ValueError, "device_ids is empty: leave it out .* sim:0, sim:1, sim:2, sim:3"),
        ([0, 4], ValueError, "device_ids: there is no accelerator 4; this process sees sim:0, sim:1, sim:2, sim:3"),
        ([-1], ValueError, "there is no accelerator -1"),
        (["sim:0", "sim:5"], ValueError, "no accelerator 5"),
        (["cpu", 0], ValueError, r"device_ids=\['cpu', 0\] mixes kinds of device"),
        (["gpu:0"], ValueError, "device_ids: 'gpu:0' is not a device"),
        (["sim:x"], ValueError, "'sim:x' is not a device"),
        (["meta"], ValueError, "the meta device stores no data"),
        ([True, False], TypeError, "expected an int, a string or a torch.device, got True"),
        ([0.0], TypeError, "got 0.0"),
        ([None], TypeError, "got None"),
        *((value, TypeError, r"device_ids=.*expected a list, such as") for value in (0, "0,1", b"cpu", CPU, {0, 1})),
    ],
    ids=repr,
)
def test_devices_that_cannot_be_used(sim, device_ids, error, message):
    """A13: the value, and what is there."""
    with pytest.raises(error, match=message):
        devices.resolve(device_ids)


@pytest.mark.parametrize("device_id", ["cuda:0", "xpu", "mps"])
@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without accelerators")
def test_a_device_that_this_build_of_torch_lacks(no_accelerators, device_id):
    """A13: ValueError, whatever torch raises."""
    with pytest.raises(ValueError, match=f"device_ids: {device_id}.* cannot be used here .*sees no accelerator"):
        devices.resolve([device_id])


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", None])
def test_a_variable_that_hides_devices_is_named(sim, monkeypatch, variable):
    """A13: where CUDA_VISIBLE_DEVICES is set, the message says that it renumbers from 0."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "4,5,6,7")
    hint = rf" \({variable}='4,5,6,7' hides .* from 0\)" if variable else ""
    with pytest.raises(ValueError, match=f"accelerator 4; .*sim:3{hint}$"):
        devices.resolve([4])


GPUS = [torch.device("cuda", index) for index in range(3)]


@pytest.fixture
def gpus(monkeypatch):
    """`GPUS`, as torch has them, but for what a test adds to the module that torch has for them."""
    module = SimpleNamespace()
    monkeypatch.setattr(devices, "accelerators", lambda: GPUS)
    monkeypatch.setattr(devices, "computes_on_host", lambda device: device.type == "cpu")
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    return module


MEMORY = "cuda:2 has less than 75 % of the memory of cuda:0.*"


@pytest.mark.parametrize(
    ("memory", "cores", "used", "message"),
    [
        ((16, 16, 8), (10, 10, 10), (0, 1, 2), rf"{MEMORY}shares=\[1.0, 1.0, 0.5\].*leave cuda:2 out"),
        ((16, 16, 8), (10, 10, 10), (0, 0, 2), rf"{MEMORY}shares=\[1.0, 1.0, 0.5\]"),  # one a replica
        ((16,) * 3, (40, 10, 80), (0, 1, 2), r"cuda:1 has .* cores of cuda:2.*shares=\[0.5, 0.12, 1.0\]"),
        ((16, 12, 16), (10, 10, 10), (0, 1, 2), None),  # 75 % is enough
        ((16, 12, 8), (10, 10, 10), (0, 0), None),  # a device is not compared with itself
        ((16, 1, 16), (10, 10, 10), (0, 2, "cpu"), None),  # only the devices in use are compared
        ((None, 8, 16), (None,) * 3, (0, 1, 2), None),  # properties that have other names
    ],
)
def test_unequal_devices(gpus, memory, cores, used, message):
    """A5, A12: memory or cores that differ by more than 25 %; the weights to use are in the warning."""
    properties = [
        SimpleNamespace(total_memory=gib and gib * 2**30, multi_processor_count=count)
        for gib, count in zip(memory, cores, strict=True)
    ]
    gpus.get_device_properties = lambda device: properties[device.index]
    said = unequal_devices.imbalance([CPU if i == "cpu" else GPUS[i] for i in used])
    assert (said is None) if message is None else re.search(message, said)


# random states


@pytest.mark.parametrize("used", [None, [CPU, GPUS[1], GPUS[1]]], ids=["all", "some"])
def test_random_states_of_accelerators(gpus, monkeypatch, used):
    """Each is asked for while its device is the current one; a kind without a generator is left out.

    Those that are not used are not touched: that would make a context, which takes memory, on devices of other people.
    """
    entered, held = [], {device: torch.tensor([device.index]) for device in GPUS}

    @contextlib.contextmanager
    def using(device, streams):
        entered.append(device)
        yield

    monkeypatch.setattr(devices, "using", using)
    gpus.get_rng_state = lambda: held[entered[-1]]
    gpus.set_rng_state = lambda state: held.update({entered[-1]: state})
    expected = GPUS if used is None else [GPUS[1]]
    states = devices.random_states(used)
    assert [state.tolist() for state in states[1:]] == [[device.index] for device in expected]
    held.clear()
    devices.set_random_states(states, used)
    assert {device: state.tolist() for device, state in held.items()} == {d: [d.index] for d in expected}
    assert entered == 2 * expected
    del gpus.get_rng_state
    assert len(devices.random_states(used)) == 1
    devices.set_random_states(states[:1], used)


@pytest.fixture
def generators(gpus):
    """One for each of `GPUS`, as CUDA has them; they are the CPU's kind."""
    gpus.default_generators = tuple(torch.Generator().manual_seed(7) for _ in GPUS)
    return gpus.default_generators


def test_accelerators_with_one_seed_get_seeds_of_their_own(generators):
    """N6: after torch.manual_seed; the first keeps its seed; equal seeds give equal ones, different seeds stay."""
    devices.seed_differently(GPUS)
    seeds = [generator.initial_seed() for generator in generators]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    drawn = [torch.rand(3, generator=generator) for generator in generators]
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == 3
    devices.seed_differently(GPUS)  # a generator with a seed of its own is not reset
    assert not torch.equal(torch.rand(3, generator=generators[1]), drawn[1])
    for generator in generators:
        generator.manual_seed(7)
    devices.seed_differently([GPUS[0], GPUS[0], GPUS[1], GPUS[1], GPUS[2]])
    assert [generator.initial_seed() for generator in generators] == seeds
    generators[1].manual_seed(7)
    generators[2].manual_seed(8)
    devices.seed_differently(GPUS[:1] * 2 + GPUS[2:])
    assert [generator.initial_seed() for generator in generators] == [7, 7, 8]


def test_generators_of_accelerators_that_several_replicas_share(gpus, generators):
    """N6, A12; kinds whose module has no `default_generators` are left alone."""
    assert devices.shared_generators([*GPUS, CPU, CPU]) == {}
    assert devices.shared_generators([GPUS[1], GPUS[0], GPUS[1]]) == {GPUS[1]: generators[1]}
    del gpus.default_generators
    devices.seed_differently(GPUS)
    assert devices.shared_generators(GPUS * 2) == {}


def test_an_accelerator_is_known_by_its_uuid_where_it_has_one(gpus) -> None:
    """Two processes may each see one GPU, and call it cuda:0."""
    assert devices.identity(torch.device("cpu")) == "cpu"
    properties = SimpleNamespace(uuid="GPU-7")
    gpus.get_device_properties = lambda device: properties
    assert devices.identity(torch.device("cuda:0")) == "cuda GPU-7"
    properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id = 0, 27, 0
    whole = devices.identity(torch.device("cuda:0"))
    properties.uuid = "MIG-3"  # a slice of the same GPU
    assert devices.identity(torch.device("cuda:0")) == whole == "cuda at 0000:1b:00"
    del properties.pci_bus_id
    del properties.uuid
    assert devices.identity(torch.device("cuda:0")) == "cuda:0"


# ---- copies from one accelerator to another ------------------------------------------------------


def damaged(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return what a link delivers that loses one number in a million."""
    copy = tensor.clone()
    copy[-1] = 0
    return copy


def test_known_numbers_arrive_or_not():
    """S11: one wrong number is enough, and so is a copy that brings nothing."""
    assert devices.arrives(CPU, CPU)
    assert not devices.arrives(CPU, CPU, damaged)
    assert not devices.arrives(CPU, CPU, lambda tensor, device: torch.zeros_like(tensor))


@pytest.fixture
def tried(sim, monkeypatch):
    """Simulated devices that are taken for accelerators, and the pairs that are tried; those in `bad` fail."""
    found = SimpleNamespace(sim=sim, pairs=[], bad=set())

    def arrives(source, target):
        found.pairs.append((source, target))
        return (source, target) not in found.bad

    monkeypatch.setattr(devices, "_arriving", {})
    monkeypatch.setattr(devices, "arrives", arrives)
    monkeypatch.setattr(devices, "computes_on_host", lambda device: device.type == "cpu")
    return found


def num_copies(tensor):
    """How many nodes of autograd are behind a tensor: one a copy."""
    number, node = 0, tensor.grad_fn
    while node is not None and node.next_functions:
        number, node = number + 1, node.next_functions[0][0]
    return number


def test_each_pair_of_accelerators_is_tried_once_and_both_ways(tried, caplog):
    """S11: before its first copy; the host, and a device and itself, are not."""
    a, b, c, _ = tried.sim
    x = torch.arange(3.0, device=a, requires_grad=True)
    for _ in range(3):
        assert devices.moved_to(x, a) is x
        assert devices.copied_to(x, a) is not x
        for device in (b, CPU, b):
            copy = devices.moved_to(x, device)
            assert copy.device == device
            assert copy.tolist() == [0, 1, 2]
            assert num_copies(copy) == 1
    devices.moved_to(devices.moved_to(x, b), a)
    devices.moved_to(torch.zeros(2), c)
    assert tried.pairs == [(a, b), (b, a)]
    assert not caplog.records


@pytest.mark.parametrize("way", [1, -1])
def test_copies_that_arrive_damaged_are_made_through_the_host(tried, caplog, way):
    """S11: in both directions, whichever is the bad one, because gradients are copied the other way; logged once."""
    a, b = tried.sim[:2]
    tried.bad.add((a, b)[::way])
    x = torch.arange(3.0, device=a, requires_grad=True)
    for copy in (devices.moved_to(x, b), devices.copied_to(x, b), devices.moved_to(devices.moved_to(x, b), a)):
        assert copy.tolist() == [0, 1, 2]
        assert num_copies(copy) % 2 == 0
        (grad,) = torch.autograd.grad(copy.sum(), x)
        assert grad.device == a
    (record,) = caplog.records
    assert f"copies between {a} and {b} damage data" in record.getMessage()
    assert "through the host" in record.getMessage()


def test_a_copy_that_cannot_be_tried_is_an_error(tried, monkeypatch):
    """S11: and is tried again."""
    a, b = tried.sim[:2]

    def fails(source, target):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(devices, "arrives", fails)
        with pytest.raises(MemoryError, match="no room"):
            devices.moved_to(torch.zeros(2, device=a), b)
    assert devices.moved_to(torch.zeros(2, device=a), b).device == b


@pytest.mark.parametrize(("composed", "sync_batch_norm"), [(False, False), (False, True), (True, False)])
def test_where_the_link_is_bad_nothing_is_copied_directly(sim, monkeypatch, composed, sync_batch_norm):
    """S11: shards, parameters, buffers, outputs, statistics, gradients, and gradients of gradients."""
    monkeypatch.setattr(devices, "copies_arrive", lambda source, target: False)
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh()).to(sim[0])
    model = DataParallel(layers, sim[:2], sync_batch_norm=sync_batch_norm)
    if composed:
        model.gather = unisono.gather  # a verb of one's own
    x = torch.randn(8, 3, device=sim[0], requires_grad=True)
    with noted_on_simulated_devices() as noted:
        (grad,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        grad.pow(2).sum().backward()
    assert layers[0].weight.grad.device == sim[0]
    assert noted.copies == []


def test_numbers_are_pinned_whatever_the_default_device_is(monkeypatch):
    """Only the host's memory can be pinned; torch refuses it for a default device of the user's."""
    asked = []

    def tensor(values, *, dtype, device, pin_memory):
        asked.append((device, pin_memory))
        return torch.ones(len(values), dtype=dtype, device=device)

    monkeypatch.setattr(devices, "has_streams", lambda device: True)
    monkeypatch.setattr(devices.torch, "tensor", tensor)
    assert devices.numbers([1.0, 1.0], torch.float64, CPU).tolist() == [1.0, 1.0]
    assert asked == [("cpu", True)]


def test_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the call for every accelerator, else by CUDA's, else none that is known of."""
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (device.index, 9), raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (device.index + 1, 9))
    for owner, name, expected in ((torch.accelerator, "get_memory_info", 5), (torch.cuda, "mem_get_info", 6)):
        assert devices.free_memory_bytes(torch.device("cuda", 5)) == expected
        monkeypatch.delattr(owner, name)
    assert devices.free_memory_bytes(torch.device("cuda", 5)) == 0
