"""Models of many libraries, wrapped in one line: each has something that no other file here has.

Three steps beside the plain module, an evaluation, and what `state_dict` saves loaded into another wrapper.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from helpers.comparisons import assert_same_gradients, assert_same_state
from helpers.contract import Wrap


@dataclass(frozen=True)
class Client:
    """A model of a library.

    Attributes:
        module: the library, by the name that it is imported by.
        run, found: what the table says of it; `found` in place of "passed".
        make: returns the model.
        shapes: those of its inputs.
        output: what the loss is of, in what the model returns.
        inputs: makes its inputs of random tensors of those shapes.
        before_forward: is called with the model.
        options: of the wrapper.
    """

    module: str
    run: str
    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    output: Callable[[Any], torch.Tensor] = lambda output: output
    inputs: Callable[..., Any] = lambda *tensors: tensors
    before_forward: Callable[[nn.Module], object] = lambda model: None
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    found: str = ""


class Then(nn.Module):
    """A layer, and a function of it and the inputs."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.then = layer, forward

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.then(self.layer, *inputs)


def neural_ode() -> nn.Module:
    import torchdiffeq

    class Dynamics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

        def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.layers(y)

    times = torch.tensor([0.0, 1.0])
    return Then(Dynamics(), lambda layer, y: torchdiffeq.odeint_adjoint(layer, y, times, method="rk4")[-1])


def tensor_product() -> nn.Module:
    from e3nn import o3

    product = o3.FullyConnectedTensorProduct("4x0e+2x1o", "0e+1o", "3x0e+2x1o")
    harmonics = o3.SphericalHarmonics("0e+1o", normalize=True)
    return Then(product, lambda layer, x, position: layer(x, harmonics(position)))


def spiking_network() -> nn.Module:
    import snntorch

    def neuron(**options: Any) -> nn.Module:
        return snntorch.Leaky(beta=0.9, threshold=0.3, init_hidden=True, **options)

    layers = nn.Sequential(nn.Linear(8, 16), neuron(), nn.Linear(16, 4), neuron(output=True))
    return Then(layers, lambda layer, x: torch.stack([layer(x)[1] for _ in range(4)], 1))


def reset_hidden(model: nn.Module) -> None:
    import snntorch.utils

    snntorch.utils.reset(model.layer)


def multi_step_network() -> nn.Module:
    from spikingjelly.activation_based import functional, layer, neuron

    layers = nn.Sequential(layer.Linear(8, 16), neuron.LIFNode(v_threshold=0.1), layer.Linear(16, 4), neuron.LIFNode())
    functional.set_step_mode(layers, "m")
    return Then(layers, lambda layer, x: layer(x.transpose(0, 1)).mean(0))


def reset_neurons(model: nn.Module) -> None:
    from spikingjelly.activation_based import functional

    functional.reset_net(model)


def medical_unet() -> nn.Module:
    from monai.networks.nets import UNet

    return UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), norm="batch")


def with_metadata(image: torch.Tensor) -> Any:
    from monai.data import MetaTensor

    return (MetaTensor(image, meta={"spacing": 0.5}),)


def denoiser() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=16,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )


def quantizer() -> nn.Module:
    from vector_quantize_pytorch import VectorQuantize

    return VectorQuantize(dim=8, codebook_size=12, learnable_codebook=True, ema_update=False)


CLIENTS = [
    Client("torchdiffeq", "odeint_adjoint in forward: an ODE's layers get their gradients", neural_ode, ((5, 4),)),
    Client(
        "e3nn",
        "FullyConnectedTensorProduct, compiled by TorchScript, and SphericalHarmonics",
        tensor_product,
        ((5, 10), (5, 3)),
    ),
    Client(
        "snntorch",
        "init_hidden=True, utils.reset before each forward, the loop over time in forward",
        spiking_network,
        ((5, 8),),
        before_forward=reset_hidden,
        dtype=torch.float32,
        found="passed; what neurons keep from one forward to the next is lost, as with torch's wrapper",
    ),
    Client(
        "spikingjelly",
        "LIFNode in multi-step mode, reset_net before each forward",
        multi_step_network,
        ((5, 4, 8),),
        before_forward=reset_neurons,
        dtype=torch.float32,
    ),
    Client(
        "monai",
        "UNet of a MetaTensor, sync_batch_norm=True",
        medical_unet,
        ((5, 1, 16, 16),),
        inputs=with_metadata,
        options={"sync_batch_norm": True},
    ),
    Client(
        "diffusers",
        "UNet2DModel of samples and one time step each; it returns an object",
        denoiser,
        ((5, 1, 16, 16), (5,)),
        output=lambda output: output.sample,
        inputs=lambda sample, step: (sample, step.abs() * 100),
    ),
    Client(
        "vector_quantize_pytorch",
        'VectorQuantize with a learnable codebook, scalars="mean"',
        quantizer,
        ((5, 6, 8),),
        output=lambda output: output[0] + output[2].mean(),
        options={"scalars": "mean"},
        dtype=torch.float32,
        found="passed; a codebook of moving averages, the default, follows the first replica's rows, as in torch",
    ),
]


def three_steps(client: Client, call: nn.Module, model: nn.Module) -> list[torch.Tensor]:
    """Train; return the losses, and what an evaluation returns at last."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    found = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        torch.manual_seed(step)
        client.before_forward(model)
        call.train(step < 3)
        inputs = client.inputs(*[torch.randn(shape, generator=generator) for shape in client.shapes])
        output = client.output(call(*inputs))
        if step < 3:
            optimizer.zero_grad()
            output.pow(2).mean().backward()
            optimizer.step()
        found.append(output.detach())
    return found


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.module)
def test_model(wrap: Wrap, float64: None, client: Client) -> None:
    """X9"""
    pytest.importorskip(client.module)
    torch.set_default_dtype(client.dtype)
    tolerance = 1e-9 if client.dtype == torch.float64 else 1e-5
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(client.make().to(client.dtype))
    plain, model, other = models
    wrapped = wrap(model, **client.options)
    expected, actual = three_steps(client, plain, plain), three_steps(client, wrapped, model)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert [type(output) for output in actual] == [type(output) for output in expected]
    assert_same_gradients(model, plain, tolerance)
    assert_same_state(model, plain, tolerance)
    wrap(other, **client.options).load_state_dict(wrapped.state_dict())
    assert_same_state(other, plain, tolerance)
