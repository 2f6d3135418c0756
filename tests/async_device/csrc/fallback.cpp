// How does an operation run that has no kernel of its own here? As the CPU's, later, in the thread of a stream.
//
// (1) The call's device is found. Tensors of two devices are an error.
// (2) Sizes of results are found by the same call on meta tensors. Where that cannot tell (they depend on numbers,
//     there is no meta kernel, tensors are sparse), the call waits for its stream and is made at once: a race there is
//     not seen. Many meta kernels are Python, and take longer than the rest of a call: what they have answered is kept.
// (3) Memory for the results is taken from the allocator.
// (4) The CPU's kernel is queued. It has CPU tensors in the memory of the device's, which it does not keep.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>

#include <cstdio>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>

#include "graphs.h"
#include "hooks.h"
#include "sparse.h"
#include "tensors.h"

namespace queued {
namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;

// Operations that take tensors of the host beside those of the device, as on CUDA.
const std::set<std::string> kTakeHostTensors = {
    "aten::index",         "aten::index_put",        "aten::index_put_",          "aten::_index_put_impl_",
    "aten::_unsafe_index", "aten::_ctc_loss",        "aten::_ctc_loss_backward",  "aten::_unsafe_index_put",
    "aten::_pad_packed_sequence", "aten::_pack_padded_sequence", "aten::_pack_padded_sequence_backward"};

bool is_wrapped_number(const Tensor& tensor) { return tensor.unsafeGetTensorImpl()->is_wrapped_number(); }

const Tensor& as_wrapped_number_if(bool wrapped, const Tensor& tensor) {
  if (wrapped) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

bool is_scalar_of_host(const Tensor& tensor) { return tensor.is_cpu() && tensor.dim() == 0; }

bool holds_tensors(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::TensorType) return true;
  return type.kind() == c10::TypeKind::ListType &&
         type.castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType;
}

// What convolution_overrideable stands for on the CPU: it is composite there, and chooses its kernel itself.
bool is_convolution(const c10::OperatorHandle& op) { return op.schema().name() == "aten::convolution"; }

c10::OperatorHandle operation_of_host(const c10::OperatorHandle& op) {
  static const auto convolution = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  return op.schema().name() == "aten::convolution_overrideable" ? convolution : op;
}

void call_dense(const c10::OperatorHandle& op, DispatchKey key, Stack& stack) {
  if (!is_convolution(op)) return op.redispatchBoxed(c10::DispatchKeySet(key), &stack);
  c10::impl::ExcludeDispatchKeyGuard below_autograd(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
  op.callBoxed(&stack);
}

// Where weights are in half precision, the CPU's batch norm has its statistics in it too, and GPUs' in float, as the meta
// kernel says. Its backward wants what its forward has made.
void call_on_host(const c10::OperatorHandle& op, Stack& stack) {
  if (op.schema().name() == "aten::native_batch_norm_backward") {
    auto argument = [&, first = stack.size() - op.schema().arguments().size()](const char* name) -> IValue& {
      return stack[first + *op.schema().argumentIndexWithName(name)];
    };
    const IValue weight = argument("weight");
    for (const char* name : {"save_mean", "save_invstd"}) {
      IValue& statistics = argument(name);
      if (weight.isTensor() && weight.toTensor().defined() && statistics.isTensor() && statistics.toTensor().defined()) {
        statistics = statistics.toTensor().to(weight.toTensor().scalar_type());
      }
    }
  }
  call_dense(op, DispatchKey::CPU, stack);
}

void call_at_once(const c10::OperatorHandle& op, bool sparse, Stack& stack) {
  c10::impl::ExcludeDispatchKeyGuard below_autograd(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
  if (sparse) op.callBoxed(&stack);  // the tensors' layouts choose the kernel
  else call_on_host(op, stack);
}

// What meta kernels have answered to which calls (`Call::as_text`), as tensors of the same sizes. It is never destroyed.
std::mutex answers_mutex;
std::unordered_map<std::string, Stack>& answers = *new std::unordered_map<std::string, Stack>();

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(operation_of_host(op)),
        arguments_(op_.schema().arguments()),
        returns_(op_.schema().returns()),
        stack_(stack),
        values_(stack->end() - arguments_.size(), stack->end()) {}

  void run() {
    refuse_views();
    find_device();
    std::optional<Stack> results = find_results();
    Stack returned = results ? queue_kernel(*results) : run_at_once();
    torch::jit::drop(stack_, arguments_.size());
    for (IValue& value : returned) stack_->push_back(std::move(value));
  }

 private:
  const std::string& name() const { return op_.schema().name(); }

  void refuse_views() const {
    for (const auto& result : returns_) {
      TORCH_CHECK_NOT_IMPLEMENTED(!result.alias_info() || result.alias_info()->isWrite(),
                                  "queued has no kernel for the view ", name());
    }
  }

  void find_device() {
    for (const IValue& value : values_) {
      for_each_tensor(value, [&](const Tensor& tensor) {
        if (!is_on_device(tensor)) return;
        int index = tensor.device().index();
        TORCH_CHECK(device_ < 0 || device_ == index, two_devices(), " and ", tensor.device(), says_where());
        device_ = index;
        is_sparse_ = is_sparse_ || tensor.layout() != at::kStrided;
      });
      if (value.isDevice() && value.toDevice().type() == kDevice && device_ < 0) {
        device_ = device_or_current(value.toDevice().index());
      }
    }
    device_ = device_or_current(device_);
    for (const IValue& value : values_) {
      for_each_tensor(value, [&](const Tensor& tensor) {
        bool fits = is_on_device(tensor) || is_scalar_of_host(tensor) ||
                    (tensor.is_cpu() && kTakeHostTensors.count(name()));
        TORCH_CHECK(fits, two_devices(), " and ", tensor.device(), says_where());
      });
    }
  }

  std::string two_devices() const {
    return "Expected all tensors to be on the same device, but found at least two devices, queued:" +
           std::to_string(device_);
  }

  std::string says_where() const { return "! (when calling " + name() + ")"; }

  // All that the sizes of results depend on; none if that may be a number in a tensor of the host.
  std::optional<std::string> as_text() const {
    std::ostringstream text;
    text << op_.operator_name() << c10::get_default_dtype_as_scalartype();
    std::map<const void*, size_t> numbers;
    bool is_complete = true;
    auto add = [&](const IValue& value, auto& add) -> void {
      text << ';';
      if (value.isList()) {
        text << '[';
        for (const IValue& each : value.toListRef()) add(each, add);
        text << ']';
      } else if (value.isTensor() && value.toTensor().defined()) {
        const Tensor& tensor = value.toTensor();
        is_complete = is_complete && (!is_scalar_of_host(tensor) || is_wrapped_number(tensor));
        text << numbers.emplace(tensor.unsafeGetTensorImpl(), numbers.size()).first->second << tensor.scalar_type()
             << is_wrapped_number(tensor) << tensor.sizes() << tensor.strides();
      } else if (value.isInt() || value.isDouble() || value.isComplexDouble() || value.isBool() || value.isString()) {
        text << value.tagKind() << value;
      } else {
        is_complete = is_complete && (value.isNone() || value.isTensor() || value.isDevice() || value.isGenerator());
      }
    };
    for (const IValue& value : values_) add(value, add);
    return is_complete ? std::optional<std::string>(text.str()) : std::nullopt;
  }

  // (2) Results on the device "meta"; none where the call has to be made at once.
  std::optional<Stack> find_results() const {
    if (is_sparse_ || returns_.empty()) return std::nullopt;
    if (!op_.hasKernelForDispatchKey(DispatchKey::Meta) && !is_convolution(op_)) return std::nullopt;
    for (const auto& result : returns_) {
      if (!holds_tensors(*result.type())) return std::nullopt;
    }
    const std::optional<std::string> text = as_text();
    if (text) {
      std::lock_guard<std::mutex> lock(answers_mutex);
      auto found = answers.find(*text);
      if (found != answers.end()) return found->second;
    }
    std::map<const void*, Tensor> made;
    auto to_meta = [&](const Tensor& tensor) -> Tensor {
      if (!tensor.defined() || is_scalar_of_host(tensor)) return tensor;
      Tensor& meta = made[tensor.unsafeGetTensorImpl()];
      if (!meta.defined()) {
        meta = at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
        as_wrapped_number_if(is_wrapped_number(tensor), meta);
      }
      return meta;
    };
    Stack stack;
    for (const IValue& value : values_) {
      if (value.isDevice()) stack.emplace_back(c10::Device(at::kMeta));
      else if (value.isGenerator()) stack.emplace_back();
      else stack.push_back(with_tensors_replaced(value, to_meta));
    }
    try {
      c10::AutoGradMode no_grad(false);
      call_dense(op_, DispatchKey::Meta, stack);
      for (IValue& result : stack) {
        result = with_tensors_replaced(result, [](const Tensor& meta) -> Tensor {  // that may have an object in Python
          if (!meta.defined()) return meta;
          return at::detail::empty_strided_meta(meta.sizes(), meta.strides(), meta.scalar_type());
        });
      }
      if (text) {
        std::lock_guard<std::mutex> lock(answers_mutex);
        if (answers.size() == 100'000) answers.clear();  // scalars that change with each step are a part of the text
        answers.emplace(*text, stack);
      }
      return stack;
    } catch (const std::exception& error) {
      // Sizes depend on numbers, or the call is wrong: then the CPU's kernel says what is wrong.
      if (settings::print_why) {
        fprintf(stderr, "at once: %s: %.200s\n", c10::toString(op_.operator_name()).c_str(), error.what());
      }
      return std::nullopt;
    }
  }

  // (3), (4)
  Stack queue_kernel(const Stack& metas) {
    count_queued(name());
    Stack returned;
    std::vector<std::vector<Tensor>> to_fill(returns_.size());  // of each result that is new, where its numbers go
    for (size_t i = 0; i < returns_.size(); ++i) {
      std::optional<size_t> written = argument_of(i);
      if (written) {
        const IValue& value = values_[*written];
        if (value.isTensor() && arguments_[*written].is_out()) resize_out(value.toTensor(), metas[i].toTensor());
        returned.push_back(value);
        continue;
      }
      returned.push_back(with_tensors_replaced(metas[i], [&](const Tensor& meta) {
        Tensor made;
        if (meta.defined()) made = make_tensor(meta.sizes(), meta.strides(), meta.scalar_type(), device_);
        to_fill[i].push_back(aliases_.of(made));
        return made;
      }));
    }
    current_queue(device_).put([op = op_, stack = host_arguments(false), to_fill = std::move(to_fill)]() mutable {
      call_on_host(op, stack);
      for (size_t i = 0; i < to_fill.size(); ++i) {
        std::vector<Tensor> found;
        if (stack[i].isTensor()) found = {stack[i].toTensor()};
        else if (stack[i].isTensorList()) found = stack[i].toTensorVector();
        for (size_t k = 0; k < to_fill[i].size() && k < found.size(); ++k) {
          Tensor& to = to_fill[i][k];
          // The CPU's batch norm in eval mode returns no statistics, where its meta kernel does.
          if (to.defined() && found[k].defined() && (found[k].numel() || !to.numel())) to.copy_(found[k]);
        }
      }
    });
    return returned;
  }

  Stack run_at_once() {
    refuse_if_capturing(device_, std::string(kNotPermitted) + ": " + name() + " waits for it");
    count_at_once(name());
    current_queue(device_).synchronize();
    raise_error(device_);
    Stack stack = host_arguments(true);
    const Stack host = stack;
    call_at_once(op_, is_sparse_, stack);
    for (size_t i = 0; i < values_.size(); ++i) {
      if (values_[i].isTensor() && is_on_device(values_[i].toTensor())) bring_back(i, host[i].toTensor());
    }
    Stack returned;
    for (size_t i = 0; i < returns_.size(); ++i) {
      std::optional<size_t> written = argument_of(i);
      auto bring = [&](const Tensor& host) { return copy_to_device(host, device_); };
      returned.push_back(written ? values_[*written] : with_tensors_replaced(stack[i], bring));
    }
    return returned;
  }

  // What a call that was made at once has written, where it has not been written into the device's memory itself.
  void bring_back(size_t i, const Tensor& host) const {
    const Tensor& tensor = values_[i].toTensor();
    if (arguments_[i].is_out() && tensor.layout() == at::kStrided) {
      resize_out(tensor, host);
      current_queue(device_).put([to = HostAliases().of(tensor), host]() mutable { to.copy_(host); });
    } else if (tensor.layout() != at::kStrided && arguments_[i].alias_info() && arguments_[i].alias_info()->isWrite()) {
      replace_parts(tensor, copy_to_device(host, device_));
    }
  }

  Stack host_arguments(bool at_once) {
    auto to_host = [&](const Tensor& tensor) -> Tensor {
      if (!tensor.defined() || is_on_device(tensor)) return aliases_.of(tensor);
      if (!is_scalar_of_host(tensor)) refuse_if_capturing(device_, kPageableInCapture);
      return as_wrapped_number_if(is_wrapped_number(tensor), tensor.clone());  // the caller may change it meanwhile
    };
    Stack host;
    for (size_t i = 0; i < values_.size(); ++i) {
      const IValue& value = values_[i];
      if (arguments_[i].type()->str().find("Generator") != std::string::npos) {
        host.emplace_back(drawn_generator(value));
      } else if (value.isDevice()) {
        host.emplace_back(c10::Device(at::kCPU));
      } else if (at_once && arguments_[i].is_out() && value.isTensor() && value.toTensor().layout() == at::kStrided) {
        host.emplace_back(at::empty({0}, at::TensorOptions().dtype(value.toTensor().dtype()).device(at::kCPU)));
      } else {
        host.push_back(with_tensors_replaced(value, to_host));
      }
    }
    return host;
  }

  at::Generator drawn_generator(const IValue& value) const {
    at::Generator of = value.isGenerator() ? value.toGenerator() : default_generator(device_);
    TORCH_CHECK(of.device().type() == kDevice, "Expected a 'queued' device type for generator but found '",
                of.device().type(), "'");
    if (CapturePtr capture = current_queue(device_).capture()) return capture->draw(of);
    std::lock_guard<std::mutex> lock(of.mutex());
    return at::detail::createCPUGenerator(
        static_cast<at::CPUGeneratorImpl*>(of.unsafeGetGeneratorImpl())->random64());
  }

  static void resize_out(const Tensor& out, const Tensor& like) {
    if (out.sizes() == like.sizes()) return;
    out.resize_(like.sizes());
    if (like.strides() != out.strides() && like.is_non_overlapping_and_dense()) {
      out.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
    }
  }

  // The argument that a result is, as the schema's annotations say.
  std::optional<size_t> argument_of(size_t result) const {
    auto* info = returns_[result].alias_info();
    if (!info) return std::nullopt;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      auto* of_argument = arguments_[i].alias_info();
      if (of_argument && of_argument->beforeSets() == info->beforeSets()) return i;
    }
    return std::nullopt;
  }

  const c10::OperatorHandle op_;
  const std::vector<c10::Argument>& arguments_;
  const std::vector<c10::Argument>& returns_;
  Stack* const stack_;
  const Stack values_;
  int device_ = -1;
  bool is_sparse_ = false;
  HostAliases aliases_;
};

}  // namespace

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { Call(op, stack).run(); }

}  // namespace queued
