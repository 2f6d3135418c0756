// When is a copy made, and who waits for it? As on CUDA: between devices, and to and from pageable and pinned memory.
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/clone.h>
#include <torch/library.h>

#include <array>
#include <thread>

#include "copies.h"
#include "graphs.h"
#include "memory.h"
#include "tensors.h"

namespace queued {
namespace {

using at::Tensor;

void wait_for_host(int device) {
  current_queue(device).synchronize();
  raise_error(device);
}

void put_copy(StreamQueue& on, const Tensor& to, const Tensor& from) {
  on.put([to, from]() mutable { to.copy_(from); });
}

// A device sends one copy at a time, and receives one at a time; with a speed, a copy takes its time on both ends.
struct Link {
  std::mutex sending, receiving;
  std::atomic<int64_t> sent{0}, received{0};
};

Link& link_of(int device) {
  static std::array<Link, kMaxDevices> links;
  return links[device];
}

void put_copy_over_links(StreamQueue& on, const Tensor& to, const Tensor& from, int source, int target) {
  int64_t bytes = static_cast<int64_t>(to.nbytes());
  if (source != target) {
    link_of(source).sent += bytes;
    link_of(target).received += bytes;
  }
  int64_t mb_per_s = settings::link_mb_per_s;
  if (source == target || mb_per_s == 0) return put_copy(on, to, from);
  on.put([=]() mutable {
    std::lock_guard<std::mutex> sends(link_of(source).sending), receives(link_of(target).receiving);
    auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(bytes / mb_per_s);
    to.copy_(from);
    std::this_thread::sleep_until(until);
  });
}

// On the source's current stream, which waits for the target's first. Then the target's waits for the copy.
void copy_between_devices(const Tensor& from, const Tensor& to) {
  StreamQueue& sources = current_queue(from.device().index());
  StreamQueue& targets = current_queue(to.device().index());
  HostAliases aliases;
  if (&sources != &targets) sources.wait_for(targets.mark());
  put_copy_over_links(sources, aliases.of(to), aliases.of(from), from.device().index(), to.device().index());
  if (&sources != &targets) targets.wait_for(sources.mark());
}

bool is_pinned(const Tensor& host) { return HostAllocator::get().is_pinned(host.const_data_ptr()); }

// The allocator of pinned memory waits for this stream before another tensor gets the memory.
void keep_pinned_memory(const Tensor& host, const StreamQueue& until) {
  c10::Stream stream(c10::Stream::UNSAFE, c10::Device(kDevice, until.device), until.id);
  HostAllocator::get().record_event(const_cast<void*>(host.const_data_ptr()), nullptr, stream);
}

void copy_from_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  int device = to.device().index();
  HostAliases aliases;
  bool pinned = is_pinned(from);  // else it is read before the call returns, not in the order of the stream
  if (!pinned) refuse_if_capturing(device, kPageableInCapture);
  put_copy(current_queue(device), aliases.of(to), pinned ? aliases.of(from) : from.clone());
  if (!non_blocking) wait_for_host(device);
  else if (pinned) keep_pinned_memory(from, current_queue(device));
}

void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  int device = from.device().index();
  HostAliases aliases;
  if (!is_pinned(to)) refuse_if_capturing(device, kPageableInCapture);
  put_copy(current_queue(device), aliases.of(to), aliases.of(from));
  if (non_blocking && is_pinned(to)) keep_pinned_memory(to, current_queue(device));
  else wait_for_host(device);  // into pageable memory, whatever is asked for
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0 || self.is_same(to)) return to;
  count_queued("aten::_copy_from");
  Tensor from = self.sizes() == to.sizes() ? self : self.expand(to.sizes());
  if (!is_on_device(from)) copy_from_host(from, to, non_blocking);
  else if (!is_on_device(to)) copy_to_host(from, to, non_blocking);
  else copy_between_devices(from, to);
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {  // what item() reads
  wait_for_host(self.device().index());
  return at::_local_scalar_dense(HostAliases().of(self));
}

void record_stream(Tensor& self, c10::Stream stream) {
  DeviceAllocator::get().recordStream(self.storage().data_ptr(), stream);
}

}  // namespace

std::vector<std::pair<int64_t, int64_t>> take_link_bytes() {
  std::vector<std::pair<int64_t, int64_t>> found;
  for (int device = 0; device < settings::num_devices; ++device)
    found.emplace_back(link_of(device).sent.exchange(0), link_of(device).received.exchange(0));
  return found;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
}

// A copy reads and writes conjugated and negated tensors itself: torch's remedy for other operations is to copy them.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace queued
