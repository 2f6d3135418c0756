"""Simulated devices: different devices, like GPUs, with the numbers of the CPU."""

import copy
import pickle
import re
import warnings
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from helpers.programs import run_script
from unisono import DataParallel
from unisono.runtime import devices
from unisono.testing import SimulatedTensor, separate_memory, shown_by_torch, simulated_accelerators

MIXED = (
    r"Expected all tensors to be on the same device, but found at least two devices, "
    r"(sim:\d|cpu) and (sim:\d|cpu)! \(in aten\.\w+"
)


@pytest.fixture(scope="module", autouse=True)
def _devices_are_known() -> None:
    with simulated_accelerators(1):
        pass


def tied_autoencoder() -> nn.Module:
    encoder, decoder = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    decoder.weight = encoder.weight
    return nn.Sequential(OrderedDict(encoder=encoder, act=nn.Tanh(), decoder=decoder))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.as_tensor([1, 2], device="sim:1"),
        lambda: torch.randn(2, 3, device="sim:1"),
        lambda: torch.empty(2, 3, 4, 5, device="sim:1", memory_format=torch.channels_last),
        lambda: torch.zeros_like(torch.ones(2), device="sim:1"),
        lambda: torch.zeros_like(torch.ones(2, device="sim:1")),
        lambda: torch.ones(2, device="sim:1").new_tensor([1.0]),
        lambda: torch.ones(2, device="sim:1").new(),
        lambda: torch.ones(2, device="sim:1").new(torch.ones(2, device="sim:1")),
        lambda: torch.ones(2).to("sim:1"),
        lambda: torch.ones(2).to(torch.ones(2, device="sim:1")),
        lambda: torch.ones(2, device="sim:0").to(device="sim:1", dtype=torch.float64, non_blocking=True),
        lambda: nn.Linear(2, 2, device="sim:1").weight,
        lambda: nn.Parameter(torch.ones(2, device="sim:1")),
        lambda: nn.functional.one_hot(torch.tensor([0, 2], device="sim:1")),
        lambda: torch.ones(2, device="sim:1", dtype=torch.complex64).conj().abs(),
    ],
)
def test_tensors_are_made_on_a_simulated_device(make):
    tensor = make()
    assert isinstance(tensor, SimulatedTensor)
    assert tensor.device == torch.device("sim:1")
    assert not tensor.is_cpu
    assert tensor.cpu().device.type == "cpu"
    assert type(tensor.cpu()) is torch.Tensor


def test_default_device_context_and_tensor_values():
    with torch.device("sim:2"):
        assert torch.ones(2).device == torch.device("sim:2")
    values = torch.tensor([[1.5, 2.5]], device="sim:0")
    assert values.tolist() == [[1.5, 2.5]]
    assert values.sum().item() == 4.0
    assert torch.empty_like(values, device="meta").is_meta
    with pytest.raises(TypeError, match=r"sim:0 tensor to numpy: use \.cpu\(\)"):
        values.numpy()


def test_to_the_same_device_is_the_same_tensor_and_to_another_is_a_copy():
    x = torch.ones(3, device="sim:0")
    assert x.to("sim:0") is x
    assert x.to(x.device, torch.float32) is x
    assert x.to(x) is x
    for other in (x.to("sim:0", copy=True), x.to("sim:1"), x.cpu(), x.to("sim:1").to("sim:0")):
        assert other.data_ptr() != x.data_ptr()
        other.zero_()
    assert x.tolist() == [1.0] * 3
    source = torch.ones(3)
    source.to("sim:0").zero_()
    assert source.tolist() == [1.0] * 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_what_is_refused():
    """A ninth device, sparse and nested tensors."""
    with pytest.raises(RuntimeError, match="sim:8: there are only 8 simulated devices, sim:0 to sim:7"):
        torch.zeros(1, device="sim:8")
    with pytest.raises(RuntimeError, match="sim:8"):
        torch.zeros(1, device="sim:0").to("sim:8")
    with pytest.raises(NotImplementedError, match=r"dense tensors only, not torch\.sparse_coo"):
        torch.eye(2, device="sim:0").to_sparse()
    rows = torch.ones(2, 3, 4, device="sim:0")
    with pytest.raises(NotImplementedError, match="dense tensors only, not nested ones"):
        torch._nested_tensor_from_mask(rows, torch.ones(2, 3, dtype=torch.bool, device="sim:0"))


@pytest.mark.parametrize(
    "mix",
    [
        lambda a, b: a + b,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: a.add_(b),
        lambda a, b: torch.where(a > 0, a, b),
        lambda a, b: torch.add(a, a, out=b),
        torch.equal,
        lambda a, b: a.add_(torch.ones(2, 2)),
        lambda a, b: torch.tensor(1.0).add_(a.sum()),
        lambda a, b: a + b.sum(),
        lambda a, b: nn.Linear(2, 2).to("sim:0")(b),
        lambda a, b: nn.Linear(2, 2)(a),
        lambda a, b: nn.functional.embedding(torch.tensor([0, 1]), a),
    ],
)
def test_mixing_devices_is_refused(mix):
    """The message names both devices and the operation."""
    a, b = torch.ones(2, 2, device="sim:0"), torch.ones(2, 2, device="sim:1")
    with pytest.raises(RuntimeError, match=MIXED):
        mix(a, b)
    assert a.tolist() == b.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_a_gradient_from_another_device_is_refused():
    parameter = nn.Parameter(torch.ones(2, device="sim:0"))
    with pytest.raises(RuntimeError):
        parameter.grad = torch.ones(2, device="sim:1")
    with pytest.raises(RuntimeError):
        parameter.grad = torch.ones(2)


def test_copies_cross_devices():
    x = torch.ones(2, device="sim:0")
    x.copy_(torch.tensor([5.0, 6.0]))
    assert torch.zeros(2, device="sim:1").copy_(x).tolist() == [5.0, 6.0]
    host = torch.zeros(2)
    assert host.copy_(x) is host
    assert host.tolist() == [5.0, 6.0]
    source, target = torch.ones(2, requires_grad=True), torch.zeros(3, 2, device="sim:0")
    target[0].copy_(source)
    (target * 2).sum().backward()
    assert type(source.grad) is torch.Tensor
    assert source.grad.tolist() == [2.0] * 2


def views(device):
    x = torch.zeros(2, 3, device=device)
    x[0].add_(1)
    x.t()[2].fill_(7)
    x.view(-1)[3:5] = 2
    return [x, *x, *x.split(1), x.T, x[..., 0], x.expand(4, 2, 3)]


def indices_on_the_cpu(device):
    x = torch.arange(9.0, device=device).view(3, 3)
    found = [x[torch.tensor([2, 0])], x[x > 6], x]
    x[torch.tensor([1])] = -1
    x[0, 0] = 5.0
    x[x == 8] = 0
    return found


def in_place(device):
    x = torch.arange(6.0, device=device).view(2, 3)
    assert x.mul_(2) is x
    assert x.t_().unsqueeze_(0) is x
    out = torch.empty(0, device=device)
    assert torch.add(torch.ones(3, device=device), 1, out=out.resize_(3)) is out
    return [x, out]


def numbers_of_the_cpu(device):
    x = torch.ones(2, device=device)
    return [x * torch.tensor(3.0), torch.tensor(3.0) - x]


def derivatives_that_are_known_to_be_zero(device):
    """Second derivatives of a linear layer, and forward derivatives: torch makes their zeros in a way of its own."""
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 2).to(device), torch.randn(4, 3).to(device)
    weight = torch.ones((), requires_grad=True, device=device)
    (gradient,) = torch.autograd.grad(layer(x).square().mean() * weight, layer.weight, create_graph=True)
    torch.stack([gradient.norm(), gradient.norm() * 2]).var().backward()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent
    return [weight.grad, layer.weight.grad, tangent]


def data(device):
    parameter = nn.Parameter(torch.ones(2, device=device))
    parameter.data.mul_(3)
    replacement = torch.zeros(3, device=device)
    parameter.data = replacement
    with torch.no_grad():
        assert parameter.add_(replacement).add_(1) is parameter
    (parameter * 2).sum().backward()
    return [parameter, replacement, parameter.grad]


PROGRAMS = [views, indices_on_the_cpu, in_place, numbers_of_the_cpu, derivatives_that_are_known_to_be_zero, data]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_computes_what_it_computes_on_the_cpu(program):
    found, expected = program("sim:1"), program("cpu")
    assert {tensor.device for tensor in found} == {torch.device("sim:1")}
    assert [tensor.stride() for tensor in found] == [tensor.stride() for tensor in expected]
    torch.testing.assert_close([tensor.detach().cpu() for tensor in found], [tensor.detach() for tensor in expected])


def test_detach_shares_memory_and_the_version_counter():
    parameter = nn.Parameter(torch.ones(2, device="sim:0"))
    detached = parameter.detach()
    version = parameter._version
    detached.add_(1)
    assert detached.device == torch.device("sim:0")
    assert parameter.tolist() == [2.0, 2.0]
    assert parameter._version == version + 1
    assert detached.data_ptr() == parameter.data_ptr()
    assert detached.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()


def test_a_saved_tensor_changed_in_place_is_noticed():
    x = torch.ones(2, device="sim:0", requires_grad=True)
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_module_to_keeps_tied_weights_and_parameters():
    model = tied_autoencoder()
    weight = model.encoder.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(2, 4)).sum().backward()
    model.to("sim:0")
    assert model.encoder.weight is model.decoder.weight is weight
    assert weight.device == weight.grad.device == torch.device("sim:0")
    assert isinstance(weight, nn.Parameter)
    assert len(list(model.parameters())) == 1
    before = weight.tolist()
    optimizer.step()
    assert weight.tolist() != before
    model.to("sim:1")
    assert model.decoder.weight is weight
    assert weight.device == torch.device("sim:1")
    model.double()
    assert weight.dtype == torch.float64
    assert weight.device == torch.device("sim:1")
    model.cpu()
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}


def test_deepcopy_and_pickle_keep_device_values_and_ties():
    model = tied_autoencoder().to("sim:2")
    model(torch.ones(1, 4, device="sim:2")).sum().backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        weight = twin.encoder.weight
        assert weight is twin.decoder.weight
        assert isinstance(weight, nn.Parameter)
        assert weight.requires_grad
        assert weight.device == torch.device("sim:2")
        assert torch.equal(weight, model.encoder.weight)
        assert weight.data_ptr() != model.encoder.weight.data_ptr()
    assert torch.equal(copy.deepcopy(model).encoder.weight.grad, model.encoder.weight.grad)
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(model.encoder.weight * 2)


def test_tensors_print_their_device():
    x = torch.tensor([1.0, 2.0], device="sim:1")
    assert repr(x) == "tensor([1., 2.], device='sim:1')"
    assert str(nn.Parameter(x)) == "Parameter containing:\ntensor([1., 2.], device='sim:1', requires_grad=True)"
    product = x.requires_grad_() * 2
    assert repr(product) == "tensor([2., 4.], device='sim:1', grad_fn=<MulBackward0>)"
    assert f"{product.sum():.2f}" == "6.00"
    assert f"{x.detach()}" == "tensor([1., 2.], device='sim:1')"


def test_simulated_accelerators_are_what_the_library_sees():
    """Of all threads; until they end, with an exception and in any order."""
    real = devices.accelerators
    with simulated_accelerators(3) as present:
        assert devices.accelerators() == present == [torch.device("sim", index) for index in range(3)]
        assert devices.resolve(None) == present
        assert devices.resolve([1, "sim:0"]) == [torch.device("sim:1"), torch.device("sim:0")]
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(devices.accelerators).result() == present
        with simulated_accelerators(1):
            assert devices.accelerators() == [torch.device("sim:0")]
        assert devices.accelerators() == present
    assert devices.accelerators is real
    with pytest.raises(KeyError), simulated_accelerators(2):
        raise KeyError
    first, second = simulated_accelerators(2), simulated_accelerators(4)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert len(devices.accelerators()) == 4
    second.__exit__(None, None, None)
    assert devices.accelerators is real


@pytest.mark.parametrize("count", [0, 9, -1, 1.5, "2", None])
def test_simulated_accelerators_checks_its_count(count):
    with pytest.raises(ValueError, match="expected 1 to 8"), simulated_accelerators(count):
        pass


def test_separate_memory_lasts_until_the_last_context_ends():
    first, second = separate_memory(), separate_memory()  # of two threads, say
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert devices.has_separate_memory()
    second.__exit__(None, None, None)
    assert not devices.has_separate_memory()


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ("torch.utils.rename_privateuse1_backend('mine')", 'another backend of this process uses it as "mine"'),
        (
            "torch.accelerator.current_accelerator = lambda check_available: torch.device('cuda')\n"
            "torch.cuda.is_initialized = lambda: True",
            "this one has used cuda devices",
        ),
    ],
)
def test_a_process_has_one_kind_of_accelerator(setup, message):
    done = run_script(f"""
import torch, unisono.testing
{setup}
with unisono.testing.simulated_accelerators(2):
    pass
""")
    assert re.search(f"^RuntimeError: simulated devices need .*{message}", done.stderr, re.MULTILINE), done.stderr


def test_programs_on_the_cpu_are_left_alone():
    """Simulated after a first backward pass, when the autograd engine counts devices; warnings are errors."""
    done = run_script("""
import io
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

torch.ones(2, requires_grad=True).sum().backward()
import unisono

import unisono.testing

with unisono.testing.separate_memory():
    unisono.DataParallel(torch.nn.Linear(2, 1), ["cpu", "cpu"])(torch.ones(4, 2)).sum().backward()
assert not hasattr(torch, "sim")
with unisono.testing.simulated_accelerators(1):
    pass

assert not torch.accelerator.is_available()
try:
    assert torch.accelerator.device_count() == 0
except RuntimeError as error:  # older releases raise it for any kind of device without a driver, CUDA's too
    assert "not linked with support" in str(error)
assert torch.accelerator.current_accelerator(check_available=True) is None
torch.manual_seed(0)
torch.seed()
with torch.random.fork_rng():
    torch.rand(1)
assert len(list(DataLoader(torch.arange(6.0), batch_size=2, num_workers=1))) == 3
layer = torch.nn.Linear(2, 2)
with torch.autocast("cpu", dtype=torch.bfloat16):
    output = layer(torch.ones(1, 2))
assert output.dtype == torch.bfloat16
for use_reentrant in (True, False):
    checkpoint(layer, torch.ones(1, 2, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
for foreach in (None, True, False):
    torch.optim.AdamW(layer.parameters(), foreach=foreach).step()
torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(layer.parameters()), layer.parameters())
file = io.BytesIO()
torch.save(layer.state_dict(), file)
file.seek(0)
layer.load_state_dict(torch.load(file, map_location="cpu"))
assert torch.device("meta") == torch.empty(2, device="meta").device
x = torch.ones(2, device="sim:7", requires_grad=True)
(x * x).sum().backward()
print(x.grad)
""")
    assert (done.stdout, done.stderr) == ("tensor([2., 2.], device='sim:7')\n", "")


def test_views_in_inference_mode():
    """Of ordinary tensors they are ordinary, as torch's; what is computed is not."""
    for device in ("cpu", "sim:0"):
        x = torch.ones(4, device=device)
        with torch.inference_mode():
            results = [x.view(2, 2), x.detach(), x[:2], x + 1]
        assert [result.is_inference() for result in results] == [False, False, False, True]
        assert [result.sum().item() for result in results] == [4.0, 4.0, 2.0, 8.0]


def test_torch_shows_the_devices_to_the_program_and_not_to_itself() -> None:
    """N12: as under the pytest plugin; a loader of torch's would pin memory, which no simulated device has."""
    with simulated_accelerators(3), shown_by_torch():
        assert torch.accelerator.is_available()
        assert torch.accelerator.device_count() == 3
        assert torch.accelerator.current_accelerator() == torch.device("sim:0")
        assert torch.ones(2, device=torch.accelerator.current_accelerator()).device == torch.device("sim:0")
        with torch.accelerator.device_index(2):
            assert torch.accelerator.current_device_index() == 2
        torch.accelerator.set_device_index("sim:1")
        assert torch.accelerator.current_device_index() == 1
        torch.accelerator.synchronize()
        assert torch.accelerator.memory_allocated() == 0
        loader = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2, pin_memory=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it does not pin
            assert len([*loader]) == 2
        model = DataParallel(nn.Linear(2, 2).to("sim:0"))
        assert model(torch.ones(6, 2)).device == torch.device("sim:0")
        assert len(model.devices) == 3
    assert not torch.accelerator.is_available()


@pytest.mark.parametrize("made", ["moved", "there"])
def test_lazy_modules_train(made: str) -> None:
    """N12: `LazyLinear(10).to("sim:0")` was an AssertionError of torch's."""
    with simulated_accelerators(2):
        options = {"device": "sim:0"} if made == "there" else {}
        model = nn.Sequential(
            nn.LazyConv2d(4, 3, **options), nn.LazyBatchNorm2d(**options), nn.Flatten(), nn.LazyLinear(2, **options)
        ).to("sim:0")
        x = torch.randn(4, 3, 5, 5, device="sim:0")
        assert model(x[:2]).device == torch.device("sim:0")
        assert [type(layer) for layer in model] == [nn.Conv2d, nn.BatchNorm2d, nn.Flatten, nn.Linear]
        assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {torch.device("sim:0")}
        optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), model[3].weight.detach().cpu().clone()
        DataParallel(model, sync_batch_norm=False)(x).sum().backward()
        optimizer.step()
        assert not torch.equal(model[3].weight.detach().cpu(), before)


def test_lazy_modules_elsewhere_are_as_before() -> None:
    """N12"""
    with simulated_accelerators(2):
        for layer in (nn.LazyLinear(3), nn.LazyLinear(3).to("sim:0").to("cpu"), nn.LazyLinear(3).to(torch.float32)):
            assert layer(torch.ones(2, 4)).device == torch.device("cpu")
            assert all(parameter.requires_grad for parameter in layer.parameters())
        with pytest.raises(ValueError, match="does not know the shape"):
            DataParallel(nn.LazyLinear(3).to("sim:0"))(torch.ones(4, 3))
