// How do tensors of the device look from the host, and the other way round?
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>

#include "streams.h"

namespace queued {

inline bool is_on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }

at::Tensor make_tensor(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype, int device);

// A copy of a host's tensor of any layout, made by the device's current stream.
at::Tensor copy_to_device(const at::Tensor& host, int device);

// CPU tensors in the memory of device tensors, for the CPU's kernels. They do not keep the memory, as a kernel on a GPU
// does not. Tensors of one call that share a storage, or are one tensor, do so on the host, too.
class HostAliases {
 public:
  at::Tensor of(const at::Tensor& tensor);

 private:
  at::Tensor of_dense(const at::Tensor& tensor);
  at::Tensor of_sparse(const at::Tensor& tensor);

  std::map<const void*, c10::Storage> storages_;
  std::map<const void*, at::Tensor> tensors_;
};

// A value with its tensors replaced by what `replace` makes of each.
template <class F>
c10::IValue with_tensors_replaced(const c10::IValue& value, F&& replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(replace(each));
    return list;
  }
  if (!value.isList()) return value;
  auto values = value.toListRef();
  bool has_tensors = std::any_of(values.begin(), values.end(), [](const c10::IValue& each) { return each.isTensor(); });
  if (!has_tensors && !value.isOptionalTensorList()) return value;
  c10::List<std::optional<at::Tensor>> list;
  for (const c10::IValue& each : values) {
    list.push_back(each.isTensor() ? std::optional<at::Tensor>(replace(each.toTensor())) : std::nullopt);
  }
  return list;
}

template <class F>
void for_each_tensor(const c10::IValue& value, F&& f) {
  with_tensors_replaced(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) f(tensor);
    return tensor;
  });
}

// How many calls of each operation were queued, and how many waited for their stream and were made at once.
struct CallCounts {
  int64_t queued = 0, at_once = 0;
};
void count_queued(const std::string& operation);
void count_at_once(const std::string& operation);
std::map<std::string, CallCounts> call_counts();

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace queued
