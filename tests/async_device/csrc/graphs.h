// What is a graph? The tasks that were put on a stream while it captured. A replay puts copies of them on a stream.
//
// While a stream captures, nothing of what is put on it runs. What cannot be part of a graph is an error, which ends the
// capture's use: capture_end raises then, too. As CUDA's graphs, with one stream each.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/GraphImplInterface.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "streams.h"

namespace queued {

struct Recording {
  struct Task {
    std::function<void()> run;
    Kind kind;
  };
  // A kernel that draws has a CPU generator of its own. Each replay seeds it with a number that it draws from the device's.
  struct Draw {
    at::Generator from, by_kernel;
  };
  void seed(const std::vector<uint64_t>& seeds) const;
  std::vector<uint64_t> draw_seeds() const;

  std::vector<Task> tasks;
  std::vector<Draw> draws;
};

// What a stream has from capture_begin to capture_end.
class Capture {
 public:
  Capture(c10::MempoolId_t pool, at::GraphCaptureMode mode) : pool(pool), mode(mode) {}

  void append(std::function<void()> task, Kind kind);
  at::Generator draw(const at::Generator& from);
  [[noreturn]] void refuse(const std::string& why);  // raises, and makes the capture invalid
  void raise_if_invalid() const;
  Recording take();  // ends it

  const c10::MempoolId_t pool;
  const at::GraphCaptureMode mode;
  const std::thread::id thread = std::this_thread::get_id();

 private:
  std::mutex mutex_;
  Recording recording_;
  std::string error_;  // the first
  bool ended_ = false;
};

constexpr char kNotPermitted[] = "operation not permitted when stream is capturing";
constexpr char kPageableInCapture[] =
    "operation not permitted when stream is capturing: cannot copy between CPU and queued tensors during graph capture "
    "unless the CPU tensor is pinned";

// Raises if the current stream of the device captures.
void refuse_if_capturing(int device, const std::string& why = kNotPermitted);
std::vector<CapturePtr> captures_of(int device);
// Raises if a capture forbids this thread what CUDA calls potentially unsafe: its own, or a global one of any thread.
void refuse_if_unsafe();
// The same for a synchronisation of the whole device, which no capture on it allows.
void refuse_device_synchronization(int device);

int64_t num_replays();
int64_t num_replayed_kernels();

}  // namespace queued
