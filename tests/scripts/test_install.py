"""install: which names are replaced, and put back; what the wrappers are pickled as."""

import abc
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from helpers.programs import run_script
from unisono.runtime import errors

TORCHS = torch.nn.DataParallel
TORCHS_INIT = TORCHS.__init__
CPUS = ["cpu", "cpu"]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    unisono.install().uninstall()
    assert torch.nn.DataParallel is TORCHS
    assert TORCHS.__init__ is TORCHS_INIT


@pytest.mark.usefixtures("every_module")
def test_names_are_replaced_wherever_they_are_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """X2: in torch's modules, of which some have the name of a function, and in a module that imported them before."""
    before = ModuleType("imported_before")
    exec("from torch.nn import DataParallel as Wrapper\nfrom torch.nn.parallel import gather, scatter", vars(before))
    monkeypatch.setitem(sys.modules, before.__name__, before)
    torchs = dict(vars(before))
    installed = unisono.install(CPUS)
    assert {"torch.nn.DataParallel", "torch.nn.parallel.data_parallel", "torch.nn.parallel.replicate.replicate"} <= {
        *installed.replaced
    }
    assert "imported_before.Wrapper" in installed.replaced
    after: dict[str, Any] = {}
    exec("from torch.nn.parallel.data_parallel import DataParallel, data_parallel", after)
    assert after["DataParallel"] is before.Wrapper is torch.nn.DataParallel is torch.nn.parallel.DataParallel
    assert issubclass(torch.nn.DataParallel, unisono.DataParallel)
    assert unisono.install(CPUS).replaced == ()  # again: nothing is left to replace
    installed.uninstall()
    installed.uninstall()
    assert {name: vars(before)[name] for name in torchs} == torchs


TAKEN = """
import dataclasses
from collections import OrderedDict
from torch import nn
from torch.nn.parallel import data_parallel
REGISTRY = OrderedDict(parallel=nn.DataParallel, functions=[data_parallel], pairs=[("parallel", nn.DataParallel)])
def default(wrapper=nn.DataParallel):
    return wrapper
def keyword(*, wrapper=nn.DataParallel):
    return wrapper
class Trainer:
    wrapper = nn.DataParallel
    def __init__(self, wrapper=nn.DataParallel):
        self.given = wrapper
class OwnTrainer(Trainer):
    pass
@dataclasses.dataclass(frozen=True)
class Options:
    wrapper: type = nn.DataParallel
"""
WAYS = [
    'REGISTRY["parallel"]', 'REGISTRY["pairs"][0][1]', "default()", "keyword()",
    "OwnTrainer.wrapper", "Trainer().given", "Options().wrapper",
]  # fmt: skip


def test_what_a_package_took_when_it_was_imported_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """X2: a registry, a default argument, a class attribute, also of a class that inherits it."""
    before = ModuleType("imported_before")
    monkeypatch.setitem(sys.modules, before.__name__, before)
    exec(TAKEN, vars(before))
    taken = dict.fromkeys(WAYS, TORCHS)

    def now() -> dict[str, Any]:
        return {way: eval(way, vars(before)) for way in taken}

    assert now() == taken
    with unisono.install(CPUS) as installed:
        assert now() == dict.fromkeys(taken, nn.DataParallel)
        before.REGISTRY["functions"][0](nn.Linear(5, 2), torch.zeros(4, 5), [0, 1])
        report = installed.report()
        assert "imported_before.REGISTRY['pairs'][0][1]" in installed.replaced
    assert report is not None
    assert report.functions == {"data_parallel": 1}
    assert now() == taken


def test_devices_and_options_hold_for_every_wrapper() -> None:
    """X3: whatever the script names; a subclass too; `nn.DataParallel[...]` as a base class."""

    with unisono.install(CPUS, shares=[2, 1], sync_batch_norm=True) as installed:

        class Loud(nn.DataParallel[nn.Linear]):
            pass

        for wrapper in (nn.DataParallel(nn.Linear(5, 2), device_ids=[0, 1, 2], output_device=1), Loud(nn.Linear(5, 2))):
            assert type(wrapper) in (nn.DataParallel, Loud)
            assert isinstance(wrapper, TORCHS)
            assert wrapper.sync_batch_norm
            x = torch.randn(30, 5)
            torch.testing.assert_close(wrapper(x), wrapper.module(x))
            assert [timing.rows for timing in wrapper.replica_timings] == [20, 10]
        report = installed.report()
    assert report is not None
    assert (report.forwards, report.rows) == (2, 60)
    assert report.devices == ((torch.device("cpu"),) * 2,) * 2


def test_all_wrappers_are_instances_of_what_torchs_name_means() -> None:
    """A9: those made by hand and before, too. captum asks so whether the batch is split, and did it wrong."""
    wrappers = [nn.DataParallel(nn.Linear(5, 2)), unisono.DataParallel(nn.Linear(5, 2), CPUS)]
    with unisono.install(CPUS):
        wrappers.append(nn.DataParallel(nn.Linear(5, 2)))
        assert [isinstance(wrapper, nn.DataParallel) for wrapper in wrappers] == [True] * 3
        assert not isinstance(wrappers[1].module, nn.DataParallel)


def test_a_wrapper_may_be_derived_from_an_abstract_class_too() -> None:
    """X3: as torch's may; it was a conflict of metaclasses."""
    with unisono.install(CPUS):

        class Abstract(abc.ABC):
            @abc.abstractmethod
            def predict(self, x: torch.Tensor) -> torch.Tensor: ...

        class Predictor(nn.DataParallel, Abstract):
            def predict(self, x: torch.Tensor) -> torch.Tensor:
                return self(x)

        x, wrapper = torch.randn(4, 5), Predictor(nn.Linear(5, 2))
        torch.testing.assert_close(wrapper.predict(x), wrapper.module(x))


def test_the_verbs_take_the_numbers_of_the_devices() -> None:
    """X3: a number is a place in the list of devices, counted round it; -1 and the CPU stay what they are."""
    module, x = nn.Linear(5, 2), torch.randn(30, 5)
    with unisono.install(CPUS) as installed:
        replicas = nn.parallel.replicate(module, [0, 1, 2])
        shards = nn.parallel.scatter(x, target_gpus=[0, 1, "cuda:2"])
        outputs = nn.parallel.parallel_apply(replicas, shards, devices=[0, 1, 2])
        joined = nn.parallel.gather(outputs, torch.device("cuda", 1))
        composed = nn.parallel.data_parallel(module, x, [0, 1], output_device=0)
        report = installed.report()
    torch.testing.assert_close(joined, module(x))
    torch.testing.assert_close(composed, module(x))
    assert report is not None
    assert report.functions == dict.fromkeys(["replicate", "scatter", "parallel_apply", "gather", "data_parallel"], 1)
    assert (report.forwards, report.rows) == (1, 30)


class Before(nn.DataParallel):  # type: ignore[type-arg]
    """Calls torch's methods by name."""

    def __init__(self, module: nn.Module) -> None:
        nn.DataParallel.__init__(self, module)
        self.calls: list[str] = []

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.calls.append("forward")
        return nn.DataParallel.forward(self, *inputs, **kwargs)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return nn.DataParallel.scatter(self, inputs, kwargs, device_ids)


class BeforeWithSuper(nn.DataParallel):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize("kind", [Before, BeforeWithSuper])
def test_a_class_that_was_defined_before_is_named_and_stays_torchs(
    caplog: pytest.LogCaptureFixture, kind: type[nn.Module]
) -> None:
    """X2: also where it calls `DataParallel.__init__(self, ...)` by name, a TypeError before; once, and not counted."""
    installed = unisono.install(CPUS)
    x, (model, _) = torch.randn(4, 5), [kind(nn.Linear(5, 2)) for _ in range(2)]
    assert not isinstance(model, unisono.DataParallel)
    torch.testing.assert_close(model(x), model.module(x))
    assert getattr(model, "calls", ["forward"]) == ["forward"]
    assert caplog.text.count(f".{kind.__name__} ({__file__}:") == 1
    assert "its class was defined before unisono.install()" in caplog.text
    assert installed.report().devices == ()


def test_a_class_whose_verb_calls_torchs_by_name() -> None:
    """X2: torch's verb, although the name means ours; what that calls is ours."""
    unisono.install(CPUS)
    model = Before(nn.Linear(5, 2))
    model.dim = 0
    shards, _ = model.scatter((torch.ones(4, 5),), {}, [0, 1])
    assert [x.shape[0] for (x,) in shards] == [2, 2]


def test_a_class_that_is_defined_later_is_ours_by_name_too() -> None:
    """X2, A9: its verbs are ours, unless it overrides one."""
    with unisono.install(CPUS):

        class Later(nn.DataParallel):  # type: ignore[type-arg]
            def __init__(self, module: nn.Module) -> None:
                nn.DataParallel.__init__(self, module)
                self.loss = nn.MSELoss()  # a name of the script's own
                self.device_ids, self.output_device = [0, 1], 0  # a script's, as its arguments are

            def forward(self, *inputs: Any, **kwargs: Any) -> Any:
                return nn.DataParallel.forward(self, *inputs, **kwargs)

        class Overriding(Later):
            def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
                return nn.DataParallel.scatter(self, inputs, kwargs, device_ids)

        x = torch.randn(30, 5)
        for kind, rows in ((Later, [15, 15]), (Overriding, [])):
            model = kind(nn.Linear(5, 2))
            torch.testing.assert_close(model(x), model.module(x))
            assert [timing.rows for timing in model.replica_timings] == rows
            assert model.device_ids == [torch.device("cpu")] * 2


def test_copies_keep_what_the_script_has_set() -> None:
    """X4, A14: mode, hooks, devices, options."""
    calls: list[int] = []
    with unisono.install(CPUS):
        wrapper = nn.DataParallel(nn.Linear(5, 2)).eval()
        wrapper.shares = [2, 1]
        wrapper.register_forward_hook(lambda *_: calls.append(1))
        twin = copy.deepcopy(wrapper)
        assert type(twin) is type(wrapper)
        assert not twin.training
        assert twin.devices == wrapper.devices
        assert twin.shares == (2, 1)
        twin.load_state_dict(wrapper.module.state_dict())  # without the prefix, once
        torch.testing.assert_close(twin(torch.ones(4, 5)), wrapper(torch.ones(4, 5)))
        shallow = copy.copy(wrapper)
        assert type(shallow) is type(wrapper)
        assert shallow.module is wrapper.module
        assert shallow.devices == wrapper.devices
    assert len(calls) == 2


def test_a_deep_copy_is_as_the_wrapper_was_made() -> None:
    """A14: with no further warning, on its devices, whatever is installed by then."""
    with unisono.install(CPUS):
        with pytest.warns(UserWarning, match="hidden state"):
            wrapper = nn.DataParallel(nn.LSTM(5, 4))
        with unisono.install(["cpu"] * 3):
            assert copy.deepcopy(wrapper).devices == wrapper.devices
    twin = copy.deepcopy(wrapper)
    assert type(twin) is type(wrapper)
    assert twin.devices == wrapper.devices


def test_a_pickle_is_torchs_in_both_directions(tmp_path: Path) -> None:
    """X4: a plain program loads torch's wrapper, without unisono; and what it saves is unisono's here."""
    with unisono.install(CPUS):
        model = nn.DataParallel[nn.Linear](nn.Linear(5, 2))
        torch.save(model, tmp_path / "made_here.pt")
        torch.save([model, model], tmp_path / "twice.pt")
        first, second = torch.load(tmp_path / "twice.pt", weights_only=False)
        assert first is second
    torch.save(model, tmp_path / "made_after.pt")
    done = run_script(f"""
        import sys, torch
        for name in ("made_here", "made_after"):
            model = torch.load({str(tmp_path)!r} + f"/{{name}}.pt", weights_only=False)
            assert type(model) is torch.nn.DataParallel, type(model)
            print(model(torch.ones(1, 5)).tolist())
        assert "unisono" not in sys.modules
        torch.save(model, {str(tmp_path / "plain.pt")!r})
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{model.module(torch.ones(1, 5)).tolist()}\n" * 2
    with unisono.install(CPUS):
        loaded = torch.load(tmp_path / "plain.pt", weights_only=False)
        assert type(loaded) is nn.DataParallel
        assert len(loaded.devices) == 2
        torch.testing.assert_close(loaded(torch.ones(4, 5)), model.module(torch.ones(4, 5)))


def test_a_wrapper_within_a_wrapper_is_counted_once() -> None:
    """X5: the rows of the outer one."""
    with unisono.install(CPUS) as installed:
        model = nn.DataParallel(nn.Sequential(nn.DataParallel(nn.Linear(5, 4)), nn.Linear(4, 2)))
        model(torch.zeros(30, 5)).sum().backward()
        report = installed.report()
    assert report is not None
    assert (report.forwards, report.rows) == (1, 30)
    assert 0 < report.backward_s < report.seconds


def test_a_failed_forward_has_no_rows() -> None:
    """X5: and the exception is the module's."""
    with unisono.install(CPUS) as installed:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            nn.DataParallel(nn.Linear(5, 2))(torch.zeros(30, 6))
        report = installed.report()
    assert report is not None
    assert (report.forwards, report.rows) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"device_ids": CPUS, "shares": [1, 2, 3]}, "3 weights for 2 devices"),
        ({"device_ids": ["gpu:0"]}, "is not a device"),
    ],
)
def test_wrong_options_install_nothing(arguments: dict[str, Any], error: str) -> None:
    """X3, A13."""
    with pytest.raises(ValueError, match=error):
        unisono.install(**arguments)
    assert torch.nn.DataParallel is TORCHS


def test_its_repr_counts_the_names() -> None:
    """For the last line of a cell in a notebook: `replaced` lists them."""
    with unisono.install() as installed:
        assert repr(installed) == f"unisono.install: {len(installed.replaced)} names replaced"
        assert len(installed.replaced) > 5
        assert repr(unisono.install()) == "unisono.install: options only, the names were replaced already"


def test_a_second_installation_ends_with_the_options_of_the_first() -> None:
    """X2: its end had put torch's names back, in silence, for all that followed."""
    with unisono.install(["cpu"] * 3):
        with unisono.install(["cpu"] * 2) as second:
            assert not second.replaced
            assert len(torch.nn.DataParallel(nn.Identity()).devices) == 2
        assert len(torch.nn.DataParallel(nn.Identity()).devices) == 3
    assert not issubclass(torch.nn.DataParallel, unisono.DataParallel)


def test_the_log_names_the_classes_for_which_it_comes_too_late(caplog: pytest.LogCaptureFixture) -> None:
    """X2: also those whose name of torch's class is replaced, and classes derived from them."""
    later = type("Later", (Before,), {"__module__": __name__})
    errors.forget_logged()
    with unisono.install(["cpu", "cpu"]):
        type("After", (nn.DataParallel,), {"__module__": __name__})
    (message,) = [each.getMessage() for each in caplog.records if "came too late for" in each.getMessage()]
    for kind in (Before, BeforeWithSuper, later):
        assert f"{__name__}.{kind.__name__}" in message
    assert "After" not in message
    assert "unisono.data_parallel" not in message
