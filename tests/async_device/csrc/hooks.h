// What torch asks of an accelerator as a whole: random generators, pinned memory, contexts, the current device.
#pragma once

#include <ATen/core/Generator.h>

namespace queued {

at::Generator& default_generator(int device);
void register_hooks_and_allocators();

}  // namespace queued
