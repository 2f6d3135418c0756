"""Defects on accelerators that are mended, each with its letter or number: each test states the right outcome."""

import copy
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from async_device import C
from async_device.tools import BOTH, FIRST, SECOND, child, current, layers, stalled
from helpers.comparisons import assert_same_gradients
from helpers.in_time import in_time
from helpers.modules import Calls, WithBackward, mlp
from unisono import DataParallel, SampleList
from unisono.distributed import bucketed_all_reduce
from unisono.distributed.bucketed_all_reduce import BucketedAllReduce, Structure, plan_for_ranks
from unisono.distributed.process_group import Communicator
from unisono.runtime import devices
from unisono.runtime.devices import Event

STALLED_S = 60.0  # for which a thread waits that should not
RUNS = 20

pytestmark = pytest.mark.usefixtures("float64")


def num_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def assert_trains_as_plain(module: nn.Module, step: Callable[[nn.Module], object], devices: list[Any] = BOTH) -> None:
    """Check that a step leaves the gradients that it leaves with the plain module, on the first device."""
    plain = copy.deepcopy(module).to(FIRST)
    step(plain)
    step(DataParallel(module.to(FIRST), devices))
    assert_same_gradients(module, plain, 1e-10)


def test_g_a_host_that_runs_ahead_needs_no_more_memory() -> None:
    module = layers(4, 64)
    model, x = DataParallel(module, BOTH), torch.randn(8, 64).to(FIRST)

    def step() -> None:
        model.zero_grad()
        model(x).pow(2).mean().backward()

    for _ in range(2):
        step()
        C.synchronize_all()
    before = [*map(torch.accelerator.memory_reserved, BOTH)]
    with stalled(*BOTH):
        for _ in range(6):
            step()
        more = max(now - then for now, then in zip(map(torch.accelerator.memory_reserved, BOTH), before, strict=True))
    assert more <= num_bytes(module)


def test_c_several_forwards_before_a_backward_have_the_same_bits_each_time(delays: Callable[[int], None]) -> None:
    model = DataParallel(mlp().to(FIRST), BOTH)
    batches = [torch.randn(8, 5).to(FIRST) for _ in range(6)]
    expected: list[Tensor] = []
    for seed in range(1, RUNS + 1):
        delays(seed)
        model.zero_grad()
        sum(model(x).pow(2).mean() for x in batches).backward()
        found = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
        expected = expected or found
        assert all(map(torch.equal, found, expected)), f"seed {seed}"


def test_f_several_forwards_before_a_backward_need_one_set_of_gradients() -> None:
    module = layers(8, 64)
    model, x = DataParallel(module, BOTH), torch.randn(8, 64).to(FIRST)

    def peak_bytes(num_forwards: int) -> int:
        model.zero_grad()
        loss = sum(model(x).pow(2).mean() for _ in range(num_forwards))
        C.synchronize_all()
        before = torch.accelerator.memory_allocated(FIRST)
        torch.accelerator.reset_peak_memory_stats(FIRST)
        loss.backward()
        C.synchronize_all()
        return torch.accelerator.max_memory_allocated(FIRST) - before

    peak_bytes(1)
    most = max(peak_bytes(8) for _ in range(RUNS))  # how many wait at once depends on timing
    assert most <= peak_bytes(1) + 2 * num_bytes(module)


def test_d_a_default_device_without_an_index_is_each_replica_s_own() -> None:
    x = torch.randn(12, 16).to(FIRST)
    net = Calls(lambda net, x: net.linear(x) + torch.arange(4.0), linear=nn.Linear(16, 4))
    with torch.device("queued"):
        assert_trains_as_plain(net, lambda net: net(x).sum().backward())


@pytest.mark.parametrize("x", [torch.randn(12, 5), torch.randn(12, 5, device=FIRST)], ids=["on the host", "there"])
def test_e_a_checkpoint_around_the_wrapper_is_refused_before_anything_runs(x: Tensor) -> None:
    """Two threads of devices computed one checkpoint again at once; errors, and sometimes none."""
    calls: list[Tensor] = []
    model = DataParallel(Calls(lambda net, x: calls.append(x) or x).to(FIRST), BOTH)
    with pytest.raises(RuntimeError, match=r"\(queued:0, queued:1\).*Put the checkpoint inside the module"):
        checkpoint(model, x.requires_grad_(), use_reentrant=False)
    assert not calls
    with torch.no_grad():  # no graph: as a teacher in what is checkpointed
        checkpoint(model, x, use_reentrant=False)
    with torch.autograd.graph.save_on_cpu():
        model(x)
    DataParallel(Calls(lambda net, x: checkpoint(torch.tanh, x, use_reentrant=False)), BOTH)(x).sum().backward()


@pytest.mark.parametrize("devices", [[FIRST], [FIRST] * 2, BOTH, [FIRST, *BOTH]], ids=str)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("on_host", [False, True])
def test_7_a_checkpoint_around_the_wrapper_draws_the_same_again(
    devices: list[torch.device], reentrant: bool, on_host: bool
) -> None:
    """torch's keeps the random states of the devices that its inputs are on."""
    if not reentrant and len({*devices}) > 1:
        pytest.skip("is an error")
    layer = nn.Linear(5, 40).to(FIRST)
    model = DataParallel(nn.Sequential(layer, nn.Dropout(0.5)), devices)
    for _ in range(3):
        model.zero_grad()
        x = torch.randn(7, 5, device="cpu" if on_host else FIRST, requires_grad=True)
        y = checkpoint(model, x, use_reentrant=reentrant)
        mask = (y.detach() != 0) * 2
        y.pow(2).sum().backward()
        expected = torch.autograd.grad((layer(x.to(FIRST)) * mask).pow(2).sum(), (layer.weight, x))
        torch.testing.assert_close((layer.weight.grad, x.grad), expected, rtol=1e-10, atol=1e-10)


def test_h_a_device_that_is_not_used_gets_no_context() -> None:
    """An event was recorded, waited for, or freed while another device was current."""
    script = """
        import os, torch, async_device, unisono
        net = torch.nn.Linear(4, 4).to("queued:1")
        x = torch.randn(8, 4)
        for batch in (x, x.pin_memory()):
            unisono.DataParallel(net, ["queued:1"])(batch).sum().backward()
        print([async_device.C.has_context(i) for i in range(3)])
        for output_device in ("queued:1", "cpu"):
            model = unisono.DataParallel(net, ["queued:1", "queued:2"], output_device=output_device)
            for batch in (x, x.pin_memory(), x.to("queued:1"), x.to("queued:2")):
                model(batch).sum().backward()
            with model.profile() as profile:
                model(x).sum().backward()
            str(profile)
            list(model.map([x] * 6))
            del model, profile
        print([async_device.C.has_context(i) for i in range(3)], flush=True)
        os._exit(0)  # torch's device threads can still refer to Python at exit, and abort
    """
    done = child(script, QUEUED_DEVICES="3")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[False, True, False]\n[False, True, True]\n", "")


def test_j_a_second_forward_makes_one_copy_a_bucket_and_a_map_makes_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, 64).to(FIRST)
    lists: list[int] = []  # the lengths of lists that are copied at once; this device copies their tensors singly
    copy_all = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, given: lists.append(len(to)) or copy_all(to, given))

    def copies_of(call: Callable[[], object]) -> tuple[int, int]:
        """Return how many lists are copied, and how many tensors besides."""
        before = sum(sum(counts) for name, counts in C.counts().items() if "copy" in name)
        lists.clear()
        call()
        after = sum(sum(counts) for name, counts in C.counts().items() if "copy" in name)
        return len(lists), after - before - sum(lists)

    @torch.no_grad()
    def copies_of_second_forward(module: nn.Module) -> tuple[int, int]:
        model = DataParallel(module, BOTH)
        model(x)
        return copies_of(lambda: model(x))

    _, of_inputs_and_outputs = copies_of_second_forward(nn.Tanh())
    for count in (2, 8):
        assert copies_of_second_forward(layers(count, 64)) == (1, of_inputs_and_outputs + 1)
    model, num_batches = DataParallel(layers(8, 64), BOTH), 12
    of_lists, of_map = copies_of(lambda: [*model.map([x] * num_batches)])
    assert of_lists == 1
    assert of_map <= 1 + 2 * num_batches  # a batch's input and output, where it goes to the other device


def test_m_a_lane_prepares_the_next_batch_before_its_output_is_on_the_host() -> None:
    second_of_a_lane, calls = threading.Event(), Counter[torch.device]()

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        calls[x.device] += 1
        if calls[x.device] == 2:
            second_of_a_lane.set()
        return x + 1

    model = DataParallel(Calls(forward), BOTH, output_device="cpu", timeout=100)
    mapped = iter(model.map([torch.randn(8, 5)] * 8))
    with stalled(*BOTH):
        thread = threading.Thread(target=lambda: [*mapped], daemon=True)
        thread.start()
        is_prepared = second_of_a_lane.wait(STALLED_S)
    thread.join()
    assert is_prepared


@pytest.mark.parametrize("pinned", [False, True])
def test_l_one_device_and_a_batch_on_the_host(pinned: bool) -> None:
    model, x = DataParallel(mlp().to(FIRST), [FIRST]), torch.randn(8, 5)
    x = x.pin_memory() if pinned else x
    model(x)
    with stalled(FIRST):
        in_time(lambda: model(x), STALLED_S)


def test_a_forward_that_is_run_again_has_its_replicas_until_backward_has_run() -> None:
    """An activation checkpoint calls their methods in backward."""

    def need(rows: Tensor) -> Tensor:
        if len(rows) > 2:
            raise torch.OutOfMemoryError("simulated")
        return rows

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.layers, self.way = [self.last], self.through_list

        def through_list(self, x: Tensor) -> Tensor:
            return self.layers[0](x).tanh()

        def forward(self, x: Tensor) -> Tensor:
            def last(h: Tensor) -> Tensor:
                return self.way(h)

            return WithBackward.apply(checkpoint(last, self.first(x).tanh(), use_reentrant=False), need)

    plain, x = Deep(), torch.randn(8, 4)
    model = DataParallel(copy.deepcopy(plain).to(FIRST), BOTH, rescue=True)
    model(x.to(FIRST)).square().sum().backward()
    plain.last(plain.first(x).tanh()).tanh().square().sum().backward()
    for own, expected in zip(model.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad.cpu(), expected.grad)


@pytest.mark.parametrize("devices", [[FIRST], BOTH], ids=len)
def test_samples_on_the_host(devices: list[Any]) -> None:
    """The entries of a SampleList, and a tensor with an attribute of the caller's, go to the devices: to one, too."""
    plain = Calls(lambda net, samples, x: SampleList(net.layer(torch.stack([*samples]) * x.scale)), layer=mlp())
    samples, x = SampleList(torch.randn(8, 5)), torch.randn(8, 5)
    x.scale = 2.0
    found = DataParallel(copy.deepcopy(plain).to(FIRST), devices, output_device="cpu")(samples, x)
    torch.testing.assert_close([*found], [*plain(samples, x)])


@pytest.mark.usefixtures("fresh_device")
def test_l_one_device_and_pinned_memory_that_the_device_still_writes() -> None:
    model, x = DataParallel(nn.Identity(), [FIRST]), torch.zeros(8, 5).pin_memory()
    written = torch.ones(8, 5).to(FIRST)
    C.set_delay(20_000, 100)  # each kernel is late
    x.copy_(written, non_blocking=True)
    assert model(x).eq(1).all()


def test_i_broadcasts_at_wrapping_need_little_memory() -> None:
    tensors, alive = [torch.zeros(1 << 20) for _ in range(8)], Counter[str]()

    def start(send: Any) -> Any:
        (flat, *_) = send.args
        alive["now"] += 1
        alive["most"] = max(alive["most"], alive["now"])
        return flat

    def wait(work: Any, *_: Any) -> None:
        alive["now"] -= 1

    ranks = SimpleNamespace(rank=1, _ranks=[0, 1], start=start, wait=wait)
    plan = [bucket for each in range(8) for bucket in _plan_of(each, tensors)]
    Communicator.broadcast(ranks, 0, tensors, None, "testing", plan)()  # type: ignore[arg-type]
    assert alive["most"] <= 2


def _plan_of(number: int, tensors: list[Tensor]) -> Any:
    from unisono.runtime.buckets import Form, buckets_of

    return buckets_of({number: Form.of(tensors[number])})


def test_o_a_rank_that_is_early_asks_once_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_BUCKET_BYTES", "BUCKET_BYTES"):
        monkeypatch.setattr(bucketed_all_reduce, name, 1)
    tensors, questions = [torch.zeros(64) for _ in range(100)], list[int]()
    plan = plan_for_ranks(tensors, lambda tensor: False)
    assert len(plan.buckets) == len(tensors)
    steps: Any = SimpleNamespace(is_known=lambda: questions.append(1))
    ranks: Any = SimpleNamespace()
    reduction = BucketedAllReduce(ranks, Structure(tensors, plan, 0, None, True, None, False, 0, 2), steps, {})
    for b, numbers in enumerate(plan.numbers):
        reduction.add(b, [tensors[number] for number in numbers])
    assert len(questions) <= len(plan.buckets)


def test_p_an_out_of_memory_error_in_backward_names_its_replica() -> None:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        y = net.linear(x)
        if x.device == SECOND:
            y.register_hook(lambda grad: torch.empty(1 << 40, device=grad.device))
        return y

    model = DataParallel(Calls(forward, linear=nn.Linear(16, 4)).to(FIRST), BOTH)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(torch.randn(12, 16).to(FIRST)).sum().backward()
    assert "replica 1 on queued:1" in "".join(getattr(caught.value, "__notes__", []))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")  # as is meant
@pytest.mark.parametrize("devices", [[FIRST], [FIRST] * 2, BOTH, [FIRST, *BOTH]], ids=str)
@pytest.mark.parametrize("of", ["input", "parameter"])
@pytest.mark.parametrize("left", [False, True], ids=["output", "left forward"])
def test_a_backward_on_other_streams_than_forward(devices: list[torch.device], of: str, left: bool) -> None:
    """Gradients are computed on forward's streams, and what follows, on backward's, waits for them."""
    markers: list[Any] = []

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        y = x * net.scale if of == "parameter" else x * 2
        if y.device == FIRST:
            y.register_hook(lambda _: C.stream_waits(0, markers[-1]))
        net.kept.append(y * 1)
        return net.kept[-1]

    net = Calls(forward, scale=nn.Parameter(torch.ones(8)), kept=[]).to(FIRST)
    model, x = DataParallel(net, devices), torch.ones(12, 8, device=FIRST)
    here, side = current(), torch.Stream(FIRST)
    for _ in range(2):
        markers.append(C.Marker())
        net.kept.clear()
        v = torch.ones(8, device=FIRST, requires_grad=of == "input")
        model.zero_grad()
        C.synchronize_all()
        with torch.get_device_module(FIRST).stream(side):
            y = model(x * v)
            loss = torch.stack([each.sum().to(FIRST) for each in net.kept]).sum() if left else y.sum()
        C.synchronize_all()
        loss.backward()
        found = (v if of == "input" else net.scale).grad * 1
        is_early = here.query()
        markers[-1].set()
        assert not is_early
        assert found.cpu().eq(24 if of == "input" else 12).all()


def test_one_device_and_a_batch_on_the_host_under_a_transform() -> None:
    net = mlp()
    model, rows = DataParallel(copy.deepcopy(net).to(FIRST), [FIRST]), torch.randn(3, 8, 5)
    torch.testing.assert_close(torch.func.vmap(model)(rows).cpu(), net(rows))


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("HIP error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: str(error).splitlines()[0][:60])
@pytest.mark.parametrize("in_backward", [False, True])
def test_rescue_knows_the_libraries_errors(error: Exception, in_backward: bool) -> None:
    """F11: they have memory of their own, which what torch keeps of the failed attempt is not."""
    kept_bytes: list[int] = []

    def fail_if_large(x: Tensor) -> None:
        reserved, used = (
            of(x.device) for of in (torch.accelerator.memory_reserved, torch.accelerator.memory_allocated)
        )
        if len(x) > 3:
            torch.empty(1 << 22, device=x.device)
            raise error
        kept_bytes.append(reserved - used)

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        y = net.linear(x)
        if not in_backward:
            fail_if_large(x)
        elif y.requires_grad:
            y.register_hook(fail_if_large)
        return y

    net, x = Calls(forward, linear=nn.Linear(5, 4)).to(FIRST), torch.randn(12, 5, device=FIRST)
    expected = torch.autograd.grad(net.linear(x).pow(2).sum(), net.linear.parameters())
    DataParallel(net, BOTH, rescue=True)(x).pow(2).sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in net.parameters()], [*expected])
    assert kept_bytes
    assert max(kept_bytes) < 1 << 24


def test_an_error_that_ends_a_device_keeps_its_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """All later calls of the device fail, too, those that put things back among them."""
    has_ended = threading.Event()

    def ends(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            if has_ended.is_set() and SECOND in [getattr(each, "device", None) for each in args]:
                raise torch.AcceleratorError("CUDA error: device-side assert triggered")
            return real(*args, **options)

        monkeypatch.setattr(owner, name, call)

    def fail(tensor: Tensor) -> None:
        if tensor.device == SECOND:
            has_ended.set()
            raise RuntimeError("the assertion")

    def in_forward(net: nn.Module, x: Tensor) -> Tensor:
        fail(x)
        return net.norm(x)

    def in_backward(net: nn.Module, x: Tensor) -> Tensor:
        y = net.norm(x)
        y.register_hook(fail)
        return y

    for owner, name in [(Tensor, "copy_"), (devices, "wait_stream"), (Event, "__init__"), (Event, "let_wait")]:
        ends(owner, name)
    for forward in (in_forward, in_backward):
        # The buffers are on the device that ends.
        model = DataParallel(Calls(forward, norm=nn.BatchNorm1d(4)).to(SECOND), BOTH[::-1], sync_batch_norm=False)
        has_ended.clear()
        with pytest.raises(RuntimeError, match="the assertion") as caught:
            model(torch.randn(8, 4)).sum().backward()
        has_ended.clear()
        notes = caught.value.__notes__[forward is in_forward :]  # in forward what to write comes first
        assert "replica 0 on queued:1" in notes[0]
        if forward is in_forward:
            assert "putting the buffers back failed, too: AcceleratorError" in notes[1]


@pytest.mark.parametrize("call", ["forward", "map", "parts"])
def test_a_graph_is_not_captured_around_replicas(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """R13: after a warm-up, too, when a call looks at nothing but this."""
    net, x = nn.Linear(4, 4).to(FIRST), torch.randn(8, 4, device=FIRST)
    model = DataParallel(net, [FIRST], parts=2) if call == "parts" else DataParallel(net, BOTH)
    model(x)
    monkeypatch.setattr(torch.get_device_module(FIRST), "is_current_stream_capturing", lambda: True, raising=False)
    with pytest.raises(RuntimeError, match=r"a CUDA graph is captured around .* DataParallel\(model, \[0\]\)"):
        [*model.map([x])] if call == "map" else model(x)
    DataParallel(net, [FIRST])(x)  # one device: the kernels are the module's own


def test_every_copy_between_devices_may_go_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where direct copies arrive damaged, none is made."""
    direct: list[str] = []

    def watched(name: str) -> None:
        real = getattr(Tensor, name)

        def copy(self: Tensor, *args: Any, **options: Any) -> Tensor:
            other = args[0].device if isinstance(args[0], Tensor) else args[0]
            between = {self.device, other} if isinstance(other, torch.device) else ()
            direct.extend([name] * (between == {*BOTH}))
            return real(self, *args, **options)

        monkeypatch.setattr(Tensor, name, copy)

    for name in ("copy_", "to"):
        watched(name)
    monkeypatch.setattr(devices, "copies_arrive", lambda source, target: False)
    x = torch.randn(8, 4, device=FIRST)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(FIRST)
    DataParallel(net, BOTH, sync_batch_norm=False, shares=[0, 1])(
        x
    ).sum().backward()  # the buffers' home has no replica
    DataParallel(net, BOTH, sync_batch_norm=False)(x).sum().backward()
    with torch.no_grad():
        out = torch.zeros(16, 4, device=SECOND)
        DataParallel(net.eval(), BOTH).map([x, x], out=out)
        assert out.cpu().equal(torch.cat([net(x)] * 2).cpu())
    table = nn.Embedding(8, 4, max_norm=0.5).to(FIRST)
    DataParallel(table, BOTH)(torch.arange(8, device=FIRST)).sum().backward()
    assert not direct


def test_q_cached_parametrizations_in_checkpoints() -> None:
    """In backward torch's thread of each device runs them: all had one cache, and so another replica's weight."""
    together = threading.Barrier(2)
    waits = False

    def body(net: nn.Module, x: Tensor) -> Tensor:
        with parametrize.cached():
            if waits:
                together.wait(STALLED_S)
            return net.linear(net.linear(x).tanh())

    net = Calls(lambda net, x: checkpoint(body, net, x, use_reentrant=False), linear=nn.Linear(5, 5))
    parametrize.register_parametrization(net.linear, "weight", nn.Tanh())
    x, model = torch.randn(4, 5).to(FIRST), DataParallel(copy.deepcopy(net).to(FIRST), BOTH)
    net.to(FIRST)
    for _ in range(5):
        net(x).sum().backward()
        loss = model(x).sum()
        waits = True
        in_time(loss.backward)
        waits = False
    assert_same_gradients(model.module, net)
