// Where is a tensor's memory, and when may it be used again? A caching allocator for each stream, as CUDA's, and one
// for pinned host memory. What is freed too early is overwritten with NaN while a kernel may still read it.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "streams.h"

namespace queued {

// Memory belongs to the stream that allocated it: it is used again in the order of that stream, without any wait. Who
// uses it on another stream says so with record_stream; otherwise another tensor gets it too early.
class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  static DeviceAllocator& get();

  c10::DataPtr allocate(size_t num_bytes) override;
  c10::DataPtr allocate_on(int device, size_t num_bytes);
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override;
  bool initialized() override { return true; }
  // A pool has the memory of the graphs that capture with it. It is given back with the last of them.
  void open_pool(int device, c10::MempoolId_t pool);
  void close_pool(int device, c10::MempoolId_t pool);
  void emptyCache(c10::MempoolId_t = {0, 0}) override;
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;

 private:
  struct Block {
    void* data;
    size_t size;
    int device;
    int64_t stream;
    c10::MempoolId_t pool;  // of graphs; {0, 0} is the ordinary memory
    std::set<int64_t> other_streams;  // of record_stream
    std::vector<MarkerPtr> pending;   // of those, once it is freed
    CapturePtr poisoned_in;           // the last capture that fills it with NaN once it is freed
  };
  static void release(void* block);
  static CapturePtr capture_into_pool(const Block* block);  // the one that is going on
  static void poison(Block* block);
  Block* take(int device, size_t size);  // nullptr if the device's memory is full
  void free_cached(int device);
  // The mutex is held by who calls these.
  Block* take_cached(int device, size_t size, c10::MempoolId_t pool);
  void give_back(Block* block);
  void keep(Block* block);
  void keep_those_not_pending();

  std::mutex mutex_;
  using Key = std::tuple<int, int64_t, c10::MempoolId_t, size_t>;  // device, stream, pool, size
  std::map<Key, std::vector<Block*>> cached_;
  std::map<std::pair<int, c10::MempoolId_t>, int> num_graphs_;  // of each pool that is open
  std::vector<Block*> waiting_;  // freed, and still used on another stream
  c10::CachingDeviceAllocator::DeviceStats stats_[kMaxDevices];
};

class HostAllocator final : public at::HostAllocator {
 public:
  static HostAllocator& get();
  bool is_pinned(const void* pointer);

  at::DataPtr allocate(size_t num_bytes) override;
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override;
  bool record_event(void* pointer, void*, c10::Stream stream) override;
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  struct Block {
    void* data;
    size_t size;
    std::set<std::pair<int, int64_t>> streams;  // device and stream of copies that need not have ended
    std::vector<MarkerPtr> pending;
  };
  static void release(void* block);
  // The mutex is held by who calls these.
  Block* find(const void* pointer);
  void keep(Block* block);
  void keep_those_not_pending();

  std::mutex mutex_;
  std::map<uintptr_t, Block*> blocks_;  // by address
  std::map<size_t, std::vector<Block*>> cached_;
  std::vector<Block*> waiting_;
};

void resize_storage(const c10::Storage& storage, size_t num_bytes);

}  // namespace queued
