"""The private names of torch that unisono uses: nothing else in the package may name a `torch._C` function.

A subject is a file, which begins with the question that it answers; whoever needs it imports that file. A fallback
stands only where a release of torch from 2.9 on lacks the name, or where a build, a device or a class of tensors does,
and the docstring says what happens then. A name that all of them have is used as it is, and one that each step calls is
torch's own function, without one of ours around it.

- `engine`: the backward that runs.
- `graph_nodes`: nodes of graphs, and hooks.
- `checkpoints`: activation checkpoints.
- `modes`: modes, transforms and hooks that are active in a thread.
- `compiler`: torch.compile, and other tracers.
- `torchscript`: scripted and traced modules.
- `tensor_objects`: a tensor's memory, references and changes.
- `foreach`: many tensors in one call.
- `dispatcher`: operations that are caught.
- `process_wide`: what torch keeps once a process.
- `process_groups`: process groups, FSDP and DDP.

tests/runtime/torch_private/ has a file of tests for each, with its name.
"""
