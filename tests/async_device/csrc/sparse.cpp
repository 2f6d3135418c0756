// What of sparse tensors is there? COO as far as gradients of embeddings need it; compressed layouts can be made and
// copied. torch's own kernels do that: they work on the parts, which are dense tensors of the device. Everything else
// (coalesce, sums, products) is the CPU's, by the fallback, which waits for the stream, as most of CUDA's kernels do.
#include "sparse.h"

#include <ATen/native/SparseTensorUtils.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/NativeFunctions.h>
#include <torch/library.h>

#include "tensors.h"

namespace queued {

void replace_parts(const at::Tensor& sparse, const at::Tensor& by) {
  if (sparse.layout() == at::kSparse) {
    auto* impl = at::sparse::get_sparse_impl(sparse);
    impl->raw_resize_(by.sparse_dim(), by.dense_dim(), by.sizes());
    impl->set_indices_and_values_unsafe(by._indices(), by._values());
    impl->set_coalesced(by.is_coalesced());
    return;
  }
  auto* from = static_cast<at::SparseCsrTensorImpl*>(by.unsafeGetTensorImpl());
  static_cast<at::SparseCsrTensorImpl*>(sparse.unsafeGetTensorImpl())
      ->set_member_tensors(from->compressed_indices(), from->plain_indices(), from->values(), by.sizes());
}

namespace {

// torch's kernels make tensors on the current device: each runs with the device of its tensors as the current one.
int index_of(const at::Tensor& tensor) { return is_on_device(tensor) ? tensor.device().index() : -1; }
int index_of(const std::optional<c10::Device>& device) { return device ? device->index() : -1; }
template <class Other>
int index_of(const Other&) {
  return -1;
}

template <auto kKernel, class = decltype(kKernel)>
struct OnItsDevice;
template <auto kKernel, class Result, class... Args>
struct OnItsDevice<kKernel, Result (*)(Args...)> {
  static Result call(Args... args) {
    int index = -1;
    ((index = index < 0 ? index_of(args) : index), ...);
    OnDevice on(device_or_current(index));
    return kKernel(std::forward<Args>(args)...);
  }
};

// The fallback comes last: before it torch takes compositions of its own, and many of these know dense tensors only. So
// each operation that has a kernel for the layout on the CPU is registered, unless it has been already.
void register_operations_of_cpu(torch::Library& library, c10::DispatchKey of_cpu, c10::DispatchKey of_device) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNamesForDispatchKey(of_cpu)) {
    auto op = dispatcher.findSchema(name);
    if (!op || name.getNamespace() != "aten" || op->hasKernelForDispatchKey(of_device)) continue;
    library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

using ToLayout = at::Tensor (*)(const at::Tensor&, std::optional<at::Layout>, at::OptionalIntArrayRef,
                                std::optional<int64_t>);
using ToCoo = at::Tensor (*)(const at::Tensor&, int64_t);

}  // namespace

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_to_sparse", OnItsDevice<ToLayout(at::native::dense_to_sparse)>::call);
  m.impl("_to_sparse.sparse_dim", OnItsDevice<ToCoo(at::native::dense_to_sparse)>::call);
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("empty.memory_format", OnItsDevice<at::native::empty_sparse_symint>::call);
  m.impl("_sparse_coo_tensor_with_dims", OnItsDevice<at::native::new_with_dims_sparse>::call);
  m.impl("_sparse_coo_tensor_with_dims_and_tensors",
         OnItsDevice<at::native::new_with_dims_and_tensor_sparse_symint>::call);
  m.impl("sparse_dim", OnItsDevice<at::native::sparse_dim_sparse>::call);
  m.impl("dense_dim", OnItsDevice<at::native::dense_dim_sparse>::call);
  m.impl("_dimI", OnItsDevice<at::native::sparse_dim_sparse>::call);
  m.impl("_dimV", OnItsDevice<at::native::dense_dim_sparse>::call);
  m.impl("_nnz", OnItsDevice<at::native::_nnz_sparse>::call);
  m.impl("is_coalesced", OnItsDevice<at::native::is_coalesced_sparse>::call);
  m.impl("_coalesced_", OnItsDevice<at::native::_coalesced_sparse_>::call);
  m.impl("_indices", OnItsDevice<at::native::_indices_sparse>::call);
  m.impl("_values", OnItsDevice<at::native::_values_sparse>::call);
  m.impl("indices", OnItsDevice<at::native::indices_sparse>::call);
  m.impl("values", OnItsDevice<at::native::values_sparse>::call);
  m.impl("copy_", OnItsDevice<at::native::copy_sparse_wrapper_>::call);
  m.impl("clone", OnItsDevice<at::native::clone_sparse>::call);
  m.impl("empty_like", OnItsDevice<at::native::empty_like_sparse_coo>::call);
  m.impl("zero_", OnItsDevice<at::native::zero_sparse_>::call);
  m.impl("sparse_resize_", OnItsDevice<at::native::sparse_resize_>::call);
  m.impl("sparse_resize_and_clear_", OnItsDevice<at::native::sparse_resize_and_clear_>::call);
  m.impl("resize_as_sparse_", OnItsDevice<at::native::resize_as_sparse_>::call);
  m.impl("_to_dense", OnItsDevice<at::native::sparse_to_dense>::call);
  m.impl("_sparse_broadcast_to", OnItsDevice<at::native::sparse_broadcast_to>::call);
  register_operations_of_cpu(m, c10::DispatchKey::SparseCPU, c10::DispatchKey::SparsePrivateUse1);
}

TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  m.impl("empty.memory_format", OnItsDevice<at::native::empty_sparse_compressed_symint>::call);
  m.impl("_sparse_compressed_tensor_with_dims", OnItsDevice<at::native::sparse_compressed_tensor_with_dims>::call);
  m.impl("sparse_dim", OnItsDevice<at::native::sparse_dim_sparse_csr>::call);
  m.impl("dense_dim", OnItsDevice<at::native::dense_dim_sparse_csr>::call);
  m.impl("_nnz", OnItsDevice<at::native::_nnz_sparse_csr>::call);
  m.impl("values", OnItsDevice<at::native::values_sparse_csr>::call);
  m.impl("crow_indices", OnItsDevice<at::native::crow_indices_sparse_csr>::call);
  m.impl("col_indices", OnItsDevice<at::native::col_indices_sparse_csr>::call);
  m.impl("ccol_indices", OnItsDevice<at::native::ccol_indices_sparse_csr>::call);
  m.impl("row_indices", OnItsDevice<at::native::row_indices_sparse_csr>::call);
  m.impl("copy_", OnItsDevice<at::native::copy_sparse_compressed_>::call);
  m.impl("clone", OnItsDevice<at::native::clone_sparse_compressed>::call);
  m.impl("empty_like", OnItsDevice<at::native::empty_like_sparse_csr>::call);
  register_operations_of_cpu(m, c10::DispatchKey::SparseCsrCPU, c10::DispatchKey::SparseCsrPrivateUse1);
}

}  // namespace queued
