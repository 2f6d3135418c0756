#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_sparse_compressed_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>

#include <utility>

#include "memory.h"

namespace queued {
namespace {

std::mutex counts_mutex;
std::map<std::string, CallCounts> counts;

// The same sparse tensor on another device: `move` moves its parts, which are dense.
template <class F>
at::Tensor with_parts_moved(const at::Tensor& sparse, F&& move) {
  auto layout = sparse.layout();
  if (layout == at::kSparse) {
    at::Tensor values = move(sparse._values());
    return at::_sparse_coo_tensor_unsafe(move(sparse._indices()), values, sparse.sizes(),
                                         values.options().layout(at::kSparse), sparse.is_coalesced());
  }
  bool by_rows = layout == at::kSparseCsr || layout == at::kSparseBsr;
  bool by_columns = layout == at::kSparseCsc || layout == at::kSparseBsc;
  TORCH_CHECK_NOT_IMPLEMENTED(by_rows || by_columns, "queued has no tensors of the layout ", layout);
  at::Tensor values = move(sparse.values());
  return at::_sparse_compressed_tensor_unsafe(move(by_rows ? sparse.crow_indices() : sparse.ccol_indices()),
                                              move(by_rows ? sparse.col_indices() : sparse.row_indices()), values,
                                              sparse.sizes(), values.options().layout(layout));
}

}  // namespace

at::Tensor make_tensor(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype, int device) {
  OnDevice on(device);
  return at::detail::empty_strided_generic(size, stride, &DeviceAllocator::get(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

at::Tensor copy_to_device(const at::Tensor& host, int device) {
  if (!host.defined()) return host;
  if (host.layout() != at::kStrided) {
    return with_parts_moved(host, [device](const at::Tensor& part) { return copy_to_device(part, device); });
  }
  at::Tensor copy = make_tensor(host.sizes(), host.strides(), host.scalar_type(), device);
  at::Tensor to = HostAliases().of(copy);
  current_queue(device).put([to, host]() mutable { to.copy_(host); });
  return copy;
}

at::Tensor HostAliases::of(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  auto* impl = tensor.unsafeGetTensorImpl();
  auto found = tensors_.find(impl);
  if (found != tensors_.end()) return found->second;
  at::Tensor alias = tensor.layout() == at::kStrided ? of_dense(tensor) : of_sparse(tensor);
  tensors_.emplace(impl, alias);
  return alias;
}

at::Tensor HostAliases::of_dense(const at::Tensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto found = storages_.find(storage);
  if (found == storages_.end()) {
    c10::DataPtr data(const_cast<void*>(storage->data()), c10::Device(at::kCPU));
    c10::Storage alias(c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(data), nullptr, false);
    found = storages_.emplace(storage, std::move(alias)).first;
  }
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

at::Tensor HostAliases::of_sparse(const at::Tensor& tensor) {
  return with_parts_moved(tensor, [this](const at::Tensor& part) { return of_dense(part); });
}

void count_queued(const std::string& operation) {
  std::lock_guard<std::mutex> lock(counts_mutex);
  ++counts[operation].queued;
}

void count_at_once(const std::string& operation) {
  std::lock_guard<std::mutex> lock(counts_mutex);
  ++counts[operation].at_once;
}

std::map<std::string, CallCounts> call_counts() {
  std::lock_guard<std::mutex> lock(counts_mutex);
  return counts;
}

}  // namespace queued
