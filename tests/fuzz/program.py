"""What a random program is, as data: it can be printed as Python, and made smaller.

The defaults of the fields are the simplest program that there is; a program is printed as what differs from them.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from fuzz.blocks import said_of, traits_of
from fuzz.model import INPUTS, OUTPUTS

PLACES = ("one memory", "separate memory", "ranks")
# More, which have to be asked for: a C++ compiler builds their devices.
ASYNCHRONOUS, ASYNCHRONOUS_RANKS = "asynchronous devices", "ranks on asynchronous devices"

_ONE_NUMBER = ("0-dim", "number")  # outputs with one that is a mean or a sum over the replicas


class _PrintedAsPython:
    """A dataclass that is printed as a call with the arguments that differ from the defaults."""

    def __repr__(self: Any) -> str:
        values = [(each.name, getattr(self, each.name), each.default) for each in fields(self) if each.init]
        given = [f"{name}={value!r}" for name, value, default in values if value != default]
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class Step(_PrintedAsPython):
    """An action, the rows of its batch, and the seed of all that it draws."""

    action: str = "train"
    rows: int = 4
    seed: int = 0


@dataclass(frozen=True, repr=False)
class Program(_PrintedAsPython):
    """A model, how it is wrapped, and what is done with it."""

    blocks: tuple[str, ...] = ()  # names of its layers, "family/variant"
    steps: tuple[Step, ...] = (Step(),)  # what is done, one after the other
    place: str = "one memory"  # of the replicas: one of PLACES, or another one of those above
    num_replicas: int = 2  # on the CPU; of each rank, if there are several
    shares: str | tuple[float, ...] = "chunk"
    # "model"; "part": the wrapped model is a part of another; "two": so is the layer before it; "twice": a wrapper in a
    # wrapper; "both": the wrapped model is part of another, which is wrapped.
    wraps: str = "model"
    inputs: str = "tensor"  # names of forms, see `model`
    outputs: str = "tensor"
    optimizer: str = "SGD"  # its name, see `side`
    loss: str = "sum"  # or "mean": whether a loss is divided by the number of rows
    input_gradients: bool = False  # whether inputs require a gradient
    residual: bool = False
    writes_input: bool = False
    profile: bool = False  # whether all of it is recorded
    rescue: bool = False
    # "forward" or "backward": where a replica with more than MOST_ROWS rows runs out of memory; "": nowhere.
    out_of_memory: str = ""
    parts: int = 1
    from_host: bool = False  # whether batches are on the host, not on the model's device
    own_gather: bool = False  # whether wrappers override a primitive
    output_device: str = ""  # "cpu", "last": of the replicas' devices; "": that of the model
    graphs: bool = False  # whether replicas run as graphs of kernels, from the third step of a kind on
    seed: int = 0  # of the parameters
    # The first step that is compared. Nothing looks at the numbers before, as no training loop does: so what only the
    # first steps of a structure do, such as to wait for a device, hides no fault of a later one.
    first_compared: int = 0
    # Words by which actions say what they cannot be done with: families and traits of the blocks, the flags that are
    # set, and the forms.
    traits: frozenset[str] = field(init=False, compare=False, repr=False)

    @property
    def said(self) -> tuple[str, ...]:
        """What a message says, in part, where the numbers are not those of the plain module."""
        of_blocks = [part for block in self.blocks for part in said_of(block)]
        without_paths = self.parts > 1 or self.rescue or self.graphs or self.outputs in _ONE_NUMBER
        of_outputs = ("Both are outputs of the module",) if without_paths else ()
        of_graphs = ("cannot be differentiated. Set model.graphs = False",) if self.graphs else ()
        in_a_mode = "batch norm" in self.traits and any(step.action == "backward_in_a_mode" for step in self.steps)
        # Replicas, and ranks, exchange values.
        of_modes = ("a dispatch or function mode around backward", "while a mode is active") if in_a_mode else ()
        # A parameter that `load_state_dict(assign=True)` has replaced, and that a dict still has, in two wrappers.
        is_left = "containers" in self.traits and self.wraps in ("twice", "both")
        of_left = ("computed outside forward and requires grad",) if is_left else ()
        return (
            *of_blocks,
            *INPUTS[self.inputs].said,
            *OUTPUTS[self.outputs].said,
            *of_outputs,
            *of_graphs,
            *of_modes,
            *of_left,
        )

    def __post_init__(self) -> None:
        of_blocks = {trait for block in self.blocks for trait in (block.partition("/")[0], *traits_of(block))}
        flags = {
            name
            for name in ("writes_input", "rescue", "out_of_memory", "profile", "input_gradients", "own_gather")
            if getattr(self, name)
        }
        forms = {f"inputs: {self.inputs}", f"outputs: {self.outputs}", f"wraps: {self.wraps}", f"loss: {self.loss}"}
        has_buffers = not of_blocks.isdisjoint(("batch norm", "buffers", "normed weight"))
        has_ranks = self.place in ("ranks", ASYNCHRONOUS_RANKS)
        more = {
            "ranks": has_ranks,
            "asynchronous": self.place in (ASYNCHRONOUS, ASYNCHRONOUS_RANKS),
            "buffers of ranks": has_ranks and has_buffers,
            "one replica": self.num_replicas == 1,
            "batch statistics of ranks": has_ranks and "batch norm/not tracked" in self.blocks,
            # Each entry is an output, which only one replica's rows have to do with: row N5 of docs/behaviour.md.
            "buffers, sample list": has_buffers and self.outputs == "sample list",
            "checkpointed buffers, a parameter": "written in backward" in of_blocks and self.outputs == "a parameter",
        }
        words = {word for word, is_so in more.items() if is_so}
        object.__setattr__(self, "traits", frozenset(of_blocks | flags | forms | words))
