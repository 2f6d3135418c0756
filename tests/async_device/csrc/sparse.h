#pragma once

#include <ATen/core/Tensor.h>

namespace queued {

// Give a sparse tensor the parts and the form of another one, as an operation in place does.
void replace_parts(const at::Tensor& sparse, const at::Tensor& by);

}  // namespace queued
