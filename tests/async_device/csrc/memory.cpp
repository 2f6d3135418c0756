#include "memory.h"

#include <cstdlib>
#include <cstring>

#include "graphs.h"

namespace queued {
namespace {

size_t rounded(size_t num_bytes) { return (std::max<size_t>(num_bytes, 1) + 511) / 512 * 512; }

void fill_with_nan(void* data, size_t num_bytes) { std::memset(data, 0xFF, num_bytes); }  // NaN in every float type

void release_nothing(void*) {}

constexpr c10::MempoolId_t kOrdinary{0, 0};

bool is_pending(std::vector<MarkerPtr>& markers) {
  while (!markers.empty() && markers.back()->query()) markers.pop_back();
  return !markers.empty();
}

using Stats = c10::CachingDeviceAllocator::DeviceStats;

template <class F>
void for_each_stat(Stats& stats, F&& change) {
  for (auto* each : {&stats.allocation, &stats.active, &stats.allocated_bytes, &stats.reserved_bytes,
                     &stats.active_bytes, &stats.requested_bytes}) {
    change((*each)[0]);
  }
}

}  // namespace

// ---- device memory ----

DeviceAllocator& DeviceAllocator::get() {
  static auto* allocator = new DeviceAllocator;  // never freed: tensors may live longer than static objects
  return *allocator;
}

CapturePtr DeviceAllocator::capture_into_pool(const Block* block) {
  CapturePtr capture = queue(block->device, block->stream).capture();
  return capture && capture->pool == block->pool ? capture : nullptr;
}

// The memory of a graph is written by graphs only, each time that they are replayed.
void DeviceAllocator::poison(Block* block) {
  auto fill = [data = block->data, size = block->size] { fill_with_nan(data, size); };
  if (block->pool == kOrdinary) return queue(block->device, block->stream).put(fill, Kind::kOutside);
  block->poisoned_in = capture_into_pool(block);
  if (block->poisoned_in) block->poisoned_in->append(fill, Kind::kOrder);
}

void DeviceAllocator::keep(Block* block) {
  if (block->pool != kOrdinary && !num_graphs_.count({block->device, block->pool})) return give_back(block);
  if (settings::poison == kWhenFree) poison(block);
  cached_[{block->device, block->stream, block->pool, block->size}].push_back(block);
}

void DeviceAllocator::give_back(Block* block) {
  free_after_all_streams(block->device, block->data);
  stats_[block->device].reserved_bytes[0].decrease(block->size);
  delete block;
}

void DeviceAllocator::open_pool(int device, c10::MempoolId_t pool) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++num_graphs_[{device, pool}];
  keep_those_not_pending();
}

void DeviceAllocator::close_pool(int device, c10::MempoolId_t pool) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (--num_graphs_[{device, pool}] > 0) return;
  num_graphs_.erase({device, pool});
  keep_those_not_pending();
  for (auto& [key, blocks] : cached_) {
    if (std::get<0>(key) != device || std::get<2>(key) != pool) continue;
    for (Block* block : blocks) give_back(block);
    blocks.clear();
  }
}

void DeviceAllocator::keep_those_not_pending() {
  std::vector<Block*> still;
  for (Block* block : waiting_) {
    // Whether a graph may use memory again must not depend on when other streams run: in the next capture it may.
    if (is_pending(block->pending) || capture_into_pool(block)) still.push_back(block);
    else keep(block);
  }
  waiting_.swap(still);
}

DeviceAllocator::Block* DeviceAllocator::take_cached(int device, size_t size, c10::MempoolId_t pool) {
  auto found = cached_.find({device, current_stream(device), pool, size});
  if (found == cached_.end() || found->second.empty()) return nullptr;
  Block* block = found->second.back();
  found->second.pop_back();
  bool is_poisoned = pool == kOrdinary || block->poisoned_in == capture_into_pool(block);
  if (settings::poison == kWhenReused || (settings::poison == kWhenFree && !is_poisoned)) poison(block);
  return block;
}

DeviceAllocator::Block* DeviceAllocator::take(int device, size_t size) {
  std::lock_guard<std::mutex> lock(mutex_);
  keep_those_not_pending();
  CapturePtr capture = current_queue(device).capture();
  c10::MempoolId_t pool = capture ? capture->pool : kOrdinary;
  Block* block = take_cached(device, size, pool);
  auto& stats = stats_[device];
  if (!block) {
    if (stats.reserved_bytes[0].current + static_cast<int64_t>(size) > settings::memory_bytes) return nullptr;
    block = new Block{std::aligned_alloc(64, size), size, device, current_stream(device), pool, {}, {}, {}};
    fill_with_nan(block->data, size);
    stats.reserved_bytes[0].increase(size);
  }
  for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes}) (*bytes)[0].increase(size);
  for (auto* count : {&stats.allocation, &stats.active}) (*count)[0].increase(1);
  return block;
}

// Gives the host its memory back, as CUDA's allocator does before it says that there is none left: also what other
// streams still use, for which it waits.
void DeviceAllocator::free_cached(int device) {
  WithoutGil released;
  std::lock_guard<std::mutex> lock(mutex_);
  for (Block* block : waiting_) {
    if (block->device != device) continue;
    for (auto& marker : block->pending) marker->wait();
  }
  keep_those_not_pending();
  for (auto& [key, blocks] : cached_) {
    if (std::get<0>(key) != device || std::get<2>(key) != kOrdinary) continue;
    for (Block* block : blocks) {  // in the order of its stream, behind the kernels that used it
      queue(device, block->stream).put([data = block->data] { std::free(data); }, Kind::kOutside);
      stats_[device].reserved_bytes[0].decrease(block->size);
      delete block;
    }
    blocks.clear();
  }
}

c10::DataPtr DeviceAllocator::allocate(size_t num_bytes) { return allocate_on(current_device(), num_bytes); }

c10::DataPtr DeviceAllocator::allocate_on(int device, size_t num_bytes) {
  check_device(device);
  c10::Device where(kDevice, device);
  if (num_bytes == 0) return {nullptr, nullptr, &release_nothing, where};
  initialize_context(device);
  Block* block = take(device, rounded(num_bytes));
  if (!block && captures_of(device).empty()) {
    free_cached(device);
    block = take(device, rounded(num_bytes));
  }
  TORCH_CHECK_WITH(OutOfMemoryError, block, "queued out of memory. Tried to allocate ", num_bytes, " bytes. Device ",
                   device, " has a total capacity of ", int64_t(settings::memory_bytes), " bytes, of which ",
                   getDeviceStats(device).reserved_bytes[0].current, " are in use.");
  return {block->data, block, &release, where};
}

void DeviceAllocator::release(void* context) {
  if (is_in_bad_fork()) return;
  auto* block = static_cast<Block*>(context);
  auto& self = get();
  std::lock_guard<std::mutex> lock(self.mutex_);
  auto& stats = self.stats_[block->device];
  for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes}) {
    (*bytes)[0].decrease(block->size);
  }
  for (auto* count : {&stats.allocation, &stats.active}) (*count)[0].decrease(1);
  for (int64_t other : block->other_streams) block->pending.push_back(queue(block->device, other).mark(Kind::kOutside));
  block->other_streams.clear();
  if (block->pending.empty()) self.keep(block);
  else self.waiting_.push_back(block);
}

void DeviceAllocator::copy_data(void* to, const void* from, size_t num_bytes) const {
  current_queue(current_device()).synchronize();
  std::memcpy(to, from, num_bytes);
}

void DeviceAllocator::emptyCache(c10::MempoolId_t) {
  for (int device = 0; device < settings::num_devices; ++device) free_cached(device);
}

void DeviceAllocator::recordStream(const c10::DataPtr& data, c10::Stream stream) {
  if (!data.get() || data.get_deleter() != &release) return;
  auto* block = static_cast<Block*>(data.get_context());
  TORCH_CHECK(block->device == stream.device_index(), "record_stream: the stream is of device ",
              int(stream.device_index()), ", and the tensor is on device ", block->device);
  std::lock_guard<std::mutex> lock(mutex_);
  if (stream.id() != block->stream) block->other_streams.insert(stream.id());
}

Stats DeviceAllocator::getDeviceStats(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_[device];
}

void DeviceAllocator::resetAccumulatedStats(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex_);
  for_each_stat(stats_[device], [](auto& stat) { stat.reset_accumulated(); });
}

void DeviceAllocator::resetPeakStats(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex_);
  for_each_stat(stats_[device], [](auto& stat) { stat.reset_peak(); });
}

std::pair<size_t, size_t> DeviceAllocator::getMemoryInfo(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t total = settings::memory_bytes;
  return {size_t(std::max<int64_t>(0, total - stats_[device].reserved_bytes[0].current)), size_t(total)};
}

void resize_storage(const c10::Storage& storage, size_t num_bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  int device = impl->device().index();
  c10::DataPtr data = DeviceAllocator::get().allocate_on(device, num_bytes);
  size_t kept = std::min(num_bytes, impl->nbytes());
  if (kept) {
    const void* from = impl->data();
    current_queue(device).put([to = data.get(), from, kept] { std::memcpy(to, from, kept); });
  }
  impl->set_data_ptr(std::move(data));
  impl->set_nbytes(num_bytes);
}

// ---- pinned host memory ----

HostAllocator& HostAllocator::get() {
  static auto* allocator = new HostAllocator;  // never freed, as the device's
  return *allocator;
}

HostAllocator::Block* HostAllocator::find(const void* pointer) {
  auto next = blocks_.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  if (next == blocks_.begin()) return nullptr;
  Block* block = std::prev(next)->second;
  return static_cast<const char*>(pointer) < static_cast<char*>(block->data) + block->size ? block : nullptr;
}

bool HostAllocator::is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(mutex_);
  return find(pointer) != nullptr;
}

void HostAllocator::keep(Block* block) {
  if (settings::poison != kNever) fill_with_nan(block->data, block->size);
  cached_[block->size].push_back(block);
}

void HostAllocator::keep_those_not_pending() {
  std::vector<Block*> still;
  for (Block* block : waiting_) {
    if (is_pending(block->pending)) still.push_back(block);
    else keep(block);
  }
  waiting_.swap(still);
}

at::DataPtr HostAllocator::allocate(size_t num_bytes) {
  if (num_bytes == 0) return {nullptr, nullptr, &release_nothing, at::kCPU};
  size_t size = rounded(num_bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  keep_those_not_pending();
  auto& cached = cached_[size];
  Block* block;
  if (cached.empty()) {
    block = new Block{std::aligned_alloc(64, size), size, {}, {}};
    blocks_[reinterpret_cast<uintptr_t>(block->data)] = block;
  } else {
    block = cached.back();
    cached.pop_back();
  }
  return {block->data, block, &release, at::kCPU};
}

void HostAllocator::release(void* context) {
  if (is_in_bad_fork()) return;
  auto* block = static_cast<Block*>(context);
  auto& self = get();
  std::lock_guard<std::mutex> lock(self.mutex_);
  for (auto [device, stream] : block->streams) block->pending.push_back(queue(device, stream).mark(Kind::kOutside));
  block->streams.clear();
  if (block->pending.empty()) self.keep(block);
  else self.waiting_.push_back(block);
}

void HostAllocator::copy_data(void* to, const void* from, size_t num_bytes) const {
  std::memcpy(to, from, num_bytes);
}

bool HostAllocator::record_event(void* pointer, void*, c10::Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  Block* block = find(pointer);
  if (block) block->streams.insert({stream.device_index(), stream.id()});
  return block != nullptr;
}

}  // namespace queued
