"""What is in a scripted or traced module, and how is it taken apart and put together?

A ScriptModule's state is in a TorchScript object, its `_c`; the Python object around it has views of that state where
other modules have dicts. A traced module, or one of a user's own subclass of ScriptModule, is one more Python object
around that one: it has nothing but `_actual_script_module`.
"""

import copy
from typing import Any

import torch


def batch_norms_in_script(module: torch.nn.Module) -> list[bool | None]:
    """Return, for each batch norm that a script calls, whether it takes statistics; None: a flag decides when it runs.

    Fallback: one of which nothing is known.
    """
    try:
        graph: Any = module.inlined_graph  # its nodes do not keep it
        return [[*node.inputs()][_TRAINING].toIValue() for node in graph.findAllNodes("aten::batch_norm")]
    except (AttributeError, RuntimeError, IndexError):
        return [None]


_TRAINING = 5  # the place of `training` among the inputs of aten::batch_norm


def is_scripted(module: torch.nn.Module) -> bool:
    """Return whether `module` has its parameters in TorchScript; False where PYTORCH_JIT=0 has disabled that."""
    return isinstance(module, torch.jit.ScriptModule) and not isinstance(module.__dict__.get("_parameters"), dict)


def can_take_scripts_apart() -> bool:
    """Return whether this release of torch has all that the functions below call.

    TorchScript is deprecated: a later torch may lack a part of it.
    """
    try:
        return None not in (
            torch._C.ScriptMethod,
            torch._C.ParameterDict,
            torch._C.BufferDict,
            torch._C.ConcreteModuleType.from_jit_type,
            torch.jit._script.OrderedDictWrapper,
            torch.jit._script.OrderedModuleDict,
        )
    except AttributeError:
        return False


def script_parts(module: torch.nn.Module) -> dict[str, Any]:
    """Return the `__dict__` that a scripted module would have as an ordinary module.

    Its `_c` is a new TorchScript object that still has the parameters, buffers and children of the old one.
    """
    attributes = {
        name: value for name, value in module.__dict__.items() if not isinstance(value, torch._C.ScriptMethod)
    }
    if "_actual_script_module" in attributes:
        return {**attributes, "_parameters": {}, "_buffers": {}, "_modules": {}}
    for part in ("_parameters", "_buffers", "_modules"):
        attributes[part] = dict(attributes[part].items())
    attributes["_c"] = copy.copy(attributes["_c"])
    return attributes


def script_from_parts(module: torch.nn.Module) -> None:
    """Turn a module whose `__dict__` is what `script_parts` returns into a scripted one. Inverse of `script_parts`."""
    attributes = module.__dict__
    parameters, buffers, children = (attributes.pop(part) for part in ("_parameters", "_buffers", "_modules"))
    if "_actual_script_module" in attributes:
        return
    script_object = attributes["_c"]
    for name, tensor in {**parameters, **buffers}.items():
        script_object.setattr(name, tensor)
    for name, child in children.items():
        if isinstance(child, torch.jit.ScriptModule):  # else one that only Python code in it uses
            script_object.setattr(name, child.__dict__.get("_actual_script_module", child).__dict__["_c"])
    attributes["_parameters"] = torch.jit._script.OrderedDictWrapper(torch._C.ParameterDict(script_object))
    attributes["_buffers"] = torch.jit._script.OrderedDictWrapper(torch._C.BufferDict(script_object))
    attributes["_modules"] = torch.jit._script.OrderedModuleDict(script_object, children)


def script_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Return a scripted module's TorchScript attributes, without parameters, buffers and children; lists are copies."""
    if "_c" not in module.__dict__:
        return {}
    script_object = module.__dict__["_c"]
    names = torch._C.ConcreteModuleType.from_jit_type(script_object._type()).get_attributes()  # type: ignore[attr-defined]
    known = {*module._parameters.keys(), *module._buffers.keys()}
    return {name: script_object.getattr(name) for name in names if name not in known}


def set_script_attribute(module: torch.nn.Module, name: str, value: Any) -> None:
    """Set one of the attributes that `script_attributes` returns."""
    module.__dict__["_c"].setattr(name, value)
