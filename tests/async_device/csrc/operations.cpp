// Which operations cannot be the CPU's? Those that make tensors, and views; and those that torch calls on accelerators
// only.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorShape.h>
#include <torch/library.h>

#include "memory.h"
#include "tensors.h"

namespace queued {
namespace {

using at::Tensor;
using c10::SymIntArrayRef;

int64_t as_int(const c10::SymInt& value) { return value.guard_int(__FILE__, __LINE__); }

// ---- tensors, their memory, and views ----

int checked_index(std::optional<c10::Device> device) {
  int index = device_or_current(device && device->has_index() ? device->index() : -1);
  check_device(index);
  return index;
}

Tensor empty(SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK_NOT_IMPLEMENTED(c10::layout_or_default(layout) == at::kStrided, "queued has no tensors of ", *layout);
  OnDevice on(checked_index(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &DeviceAllocator::get(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(SymIntArrayRef size, SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  return make_tensor(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), c10::dtype_or_default(dtype),
                     checked_index(device));
}

Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional<int64_t>(as_int(*offset)) : std::nullopt);
}

Tensor view(const Tensor& self, SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const Tensor& resize_(const Tensor& self, SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto size = C10_AS_INTARRAYREF_SLOW(sizes);
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  size_t num_bytes =
      at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), self.storage_offset());
  if (self.storage().nbytes() < num_bytes) resize_storage(self.storage(), num_bytes);
  return self;
}

Tensor& set_to(Tensor& self, c10::Storage storage, at::IntArrayRef size, at::IntArrayRef stride, int64_t offset) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
Tensor& set_storage_offset(Tensor& self, at::Storage source, c10::SymInt offset, SymIntArrayRef size,
                           SymIntArrayRef stride) {
  return set_to(self, std::move(source), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                as_int(offset));
}
Tensor& set_storage(Tensor& self, at::Storage source) {
  int64_t size = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_to(self, std::move(source), {size}, {1}, 0);
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_to(self, source.storage(), source.sizes(), source.strides(), source.storage_offset());
}
Tensor& set_nothing(Tensor& self) {
  return set_tensor(self, make_tensor({0}, {1}, self.scalar_type(), self.device().index()));
}

// Whether `self.data = from` is allowed: as on CUDA, also between the CPU and the device, and if one is conjugated. So
// Module.to() keeps its parameters. torch's own rule has a list of device kinds, without this one.
bool has_compatible_shallow_copy_type(const Tensor& self, const Tensor& from) {
  return self.layout() == from.layout();
}

Tensor to_mkldnn(const Tensor& self, std::optional<at::ScalarType>) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "Could not run 'aten::to_mkldnn': as on CUDA, MKL-DNN tensors are the CPU's only");
}

// ---- random numbers ----

// The CPU's decides by its own rules how it draws; this one is CUDA's: one mask, returned for the backward.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train && !*train) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {at::mul(input, mask).mul(p == 1 ? 0. : 1. / (1 - p)), mask};
}

// ---- what torch asks for on accelerators only ----

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, SymIntArrayRef stride, SymIntArrayRef padding,
    SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> needed) {
  count_queued("aten::convolution_backward");
  auto ints = [](SymIntArrayRef values) { return C10_AS_INTARRAYREF_SLOW(values).vec(); };
  std::vector<int64_t> bias_size{grad.size(1)};
  std::array<Tensor, 3> results;
  if (needed[0]) results[0] = at::empty_like(input);
  if (needed[1]) results[1] = at::empty_like(weight);
  if (needed[2]) results[2] = at::empty(bias_size, grad.options());
  HostAliases aliases;
  std::array<Tensor, 3> to{aliases.of(results[0]), aliases.of(results[1]), aliases.of(results[2])};
  current_queue(grad.device().index())
      .put([to, bias_size, transposed, needed, grad = aliases.of(grad), input = aliases.of(input),
            weight = aliases.of(weight), stride = ints(stride), padding = ints(padding), dilation = ints(dilation),
            output_padding = ints(output_padding), groups = as_int(groups)] {
        auto found = at::convolution_backward(grad, input, weight, at::IntArrayRef(bias_size), stride, padding,
                                              dilation, transposed, output_padding, groups, needed);
        if (needed[0]) to[0].copy_(std::get<0>(found));
        if (needed[1]) to[1].copy_(std::get<1>(found));
        if (needed[2]) to[2].copy_(std::get<2>(found));
      });
  return {results[0], results[1], results[2]};
}

using OptionalTensor = std::optional<Tensor>;

Tensor plus_bias(const Tensor& gates, const OptionalTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

Tensor or_zeros(const OptionalTensor& grad, const Tensor& like) {
  return grad && grad->defined() ? *grad : at::zeros_like(like);
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell,
                                             const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  Tensor gates = plus_bias(plus_bias(input_gates + hidden_gates, input_bias), hidden_bias);
  auto parts = gates.chunk(4, 1);
  Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid(), candidate = parts[2].tanh(), out = parts[3].sigmoid();
  Tensor next = forget * cell + in * candidate;
  return {out * next.tanh(), next, at::cat({in, forget, candidate, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const OptionalTensor& grad_hidden,
                                                      const OptionalTensor& grad_cell, const Tensor& cell,
                                                      const Tensor& next, const Tensor& workspace, bool has_bias) {
  auto parts = workspace.chunk(4, 1);
  Tensor in = parts[0], forget = parts[1], candidate = parts[2], out = parts[3], tanh = next.tanh();
  Tensor of_hidden = or_zeros(grad_hidden, next);
  Tensor of_cell = or_zeros(grad_cell, next) + of_hidden * out * (1 - tanh * tanh);
  Tensor gates = at::cat({of_cell * candidate * in * (1 - in), of_cell * cell * forget * (1 - forget),
                          of_cell * in * (1 - candidate * candidate), of_hidden * tanh * out * (1 - out)},
                         1);
  return {gates, of_cell * forget, has_bias ? gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hidden,
                                    const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  auto of_input = plus_bias(input_gates, input_bias).chunk(3, 1);
  auto of_hidden = plus_bias(hidden_gates, hidden_bias).chunk(3, 1);
  Tensor reset = (of_input[0] + of_hidden[0]).sigmoid(), update = (of_input[1] + of_hidden[1]).sigmoid();
  Tensor candidate = (of_input[2] + reset * of_hidden[2]).tanh();
  return {candidate + update * (hidden - candidate), at::cat({reset, update, candidate, hidden, of_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad, const Tensor& workspace,
                                                                     bool has_bias) {
  auto parts = workspace.chunk(5, 1);
  Tensor reset = parts[0], update = parts[1], candidate = parts[2], hidden = parts[3], of_hidden = parts[4];
  Tensor of_update = grad * (hidden - candidate) * update * (1 - update);
  Tensor of_candidate = grad * (1 - update) * (1 - candidate * candidate);
  Tensor of_reset = of_candidate * of_hidden * reset * (1 - reset);
  Tensor input_gates = at::cat({of_reset, of_update, of_candidate}, 1);
  Tensor hidden_gates = at::cat({of_reset, of_update, of_candidate * reset}, 1);
  return {input_gates, hidden_gates, grad * update, has_bias ? input_gates.sum(0) : Tensor(),
          has_bias ? hidden_gates.sum(0) : Tensor()};
}

// Attention is always torch's own composition (SDPBackend::math).
int64_t fused_sdp_choice(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, double, bool,
                         std::optional<double>, bool) {
  return 0;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize_);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("is_set_to", at::native::is_set_to);
  m.impl("to_mkldnn", to_mkldnn);
  // Otherwise these would run as their forms with out=, with a warning that the result has another size.
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("smooth_l1_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("native_dropout", native_dropout);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  m.impl("_fused_sdp_choice", fused_sdp_choice);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

}  // namespace queued
