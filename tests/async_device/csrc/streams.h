// What is a stream? A thread with a queue. A kernel is put at its end, and runs some time after the call has returned.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "settings.h"

namespace queued {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kStreamsPerDevice = 1 + 32;  // the default stream, and a pool as large as CUDA's

class Capture;  // of a graph
struct Recording;
using CapturePtr = std::shared_ptr<Capture>;
using RecordingPtr = std::shared_ptr<const Recording>;

// A point in the order of a stream: an event once recorded, or one that the host sets.
class Marker {
 public:
  explicit Marker(CapturePtr capture = nullptr) : capture(std::move(capture)) {}
  void set();
  void wait();
  bool query();
  std::chrono::steady_clock::time_point set_at();

  const CapturePtr capture;  // in which it was recorded: it is a point of a graph then, and never set

 private:
  void refuse_if_captured() const;

  std::mutex mutex_;
  std::condition_variable is_set_;
  bool set_ = false;
  std::chrono::steady_clock::time_point at_;
};
using MarkerPtr = std::shared_ptr<Marker>;

enum class Kind {
  kKernel,  // may be delayed; with QUEUED_BLOCKING=1 the caller waits for it
  kOrder,   // events, waits, the allocator's own work: never delayed, so that they do not change the kernels' delays
  kOutside,  // as kOrder, and never part of a graph: it runs even if the stream captures
};

class StreamQueue {
 public:
  void put(std::function<void()> task, Kind kind = Kind::kKernel);
  MarkerPtr mark(Kind kind = Kind::kOrder);  // is set once everything that is queued now has run
  void wait_for(MarkerPtr marker);   // the stream waits, its caller does not
  void synchronize();                // the caller waits for everything that is queued now
  bool is_idle();
  bool has_started();
  bool begin_capture(CapturePtr capture);  // false: it captures already
  void end_capture();
  CapturePtr capture();  // nullptr: it does not capture
  void replay(RecordingPtr recording, std::vector<uint64_t> seeds);
  std::pair<int64_t, int64_t> delays();  // since the seed was set: how many kernels were delayed, and by how many us

  int device = 0;
  int64_t id = 0;

 private:
  struct Task {
    std::function<void()> run;
    std::chrono::microseconds delay;
  };
  void run();
  uint64_t push(std::function<void()> task, std::chrono::microseconds delay);
  std::chrono::microseconds draw_delay();
  void use_seed();
  void wait_until(uint64_t number);

  std::mutex mutex_;
  std::condition_variable not_empty_, ended_;
  std::deque<Task> tasks_;
  uint64_t num_queued_ = 0, num_ended_ = 0;
  bool started_ = false;
  CapturePtr capture_;
  std::mt19937_64 random_;
  uint64_t seeded_ = 0;  // which set_seed() the random numbers are from
  int64_t num_delayed_ = 0, delayed_us_ = 0;
};

StreamQueue& queue(int device, int64_t stream);
StreamQueue& queue(const c10::Stream& stream);
StreamQueue& current_queue(int device);  // of the current stream

// The current device, and the current stream of each device, are a thread's own.
int current_device();
int device_or_current(int device);  // -1 is the current one
void set_device(int device);        // as CUDA 12's: makes a context on the device
void set_device_without_context(int device);
int64_t current_stream(int device);
int64_t exchange_stream(int device, int64_t stream);
int64_t next_stream_of_pool(int device);

void check_device(int device);
void initialize_context(int device);
bool has_context(int device);
bool is_anything_captured();

// Lets other threads of Python run until the end of a scope that waits: a stream may wait for one of them. In a scope
// that holds a mutex, too, this comes first.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;

 private:
  void* thread_;  // Python's state of this thread, if it had the lock of Python
};

// Makes a device current until the end of a scope.
class OnDevice {
 public:
  explicit OnDevice(int device) : before_(current_device()) { set_device_without_context(device); }
  ~OnDevice() { set_device_without_context(before_); }

 private:
  int before_;
};

void raise_error(int device);  // of a kernel that has failed since the last synchronisation, as CUDA's are raised
void synchronize_device(int device);  // but for streams that capture
void free_after_all_streams(int device, void* memory);  // behind all that is queued on the device now
void set_seed(uint64_t seed);

// A child of a process that has used the device has no threads of streams.
bool is_in_bad_fork();

}  // namespace queued
