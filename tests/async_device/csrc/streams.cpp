#include <Python.h>

#include "graphs.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <cstdio>
#include <string>
#include <thread>

namespace queued {
namespace {

std::atomic<bool> is_used{false}, bad_fork{false};
std::atomic<bool> contexts[kMaxDevices];
std::atomic<uint64_t> num_streams_given[kMaxDevices];
std::atomic<uint64_t> num_seeds_set{1};
std::atomic<int> num_captures{0};

thread_local int this_device = 0;
thread_local int64_t this_stream[kMaxDevices] = {0};

std::mutex errors_mutex;
std::string errors[kMaxDevices];  // the first one since the last synchronisation

void keep_error(int device, const std::exception& error) {
  std::string text = error.what();
  text = text.substr(0, text.find("\nException raised"));  // C++ frames of this thread tell nobody anything
  std::lock_guard<std::mutex> lock(errors_mutex);
  if (errors[device].empty()) errors[device] = text;
  if (settings::print_errors) fprintf(stderr, "queued:%d: a kernel failed: %.300s\n", device, text.c_str());
}

void refuse_bad_fork() {
  TORCH_CHECK(!bad_fork, "Cannot re-initialize queued in forked subprocess. To use queued with multiprocessing, you "
                         "must use the 'spawn' start method");
}

StreamQueue* make_queues() {
  auto* made = new StreamQueue[kMaxDevices * kStreamsPerDevice];
  for (int i = 0; i < kMaxDevices * kStreamsPerDevice; ++i) {
    made[i].device = i / kStreamsPerDevice;
    made[i].id = i % kStreamsPerDevice;
  }
  pthread_atfork(nullptr, nullptr, [] {
    if (is_used) bad_fork = true;
  });
  return made;
}

// In the thread of a stream.
void run_task(int device, std::function<void()> task, std::chrono::microseconds delay) {
  if (delay.count() > 0) std::this_thread::sleep_for(delay);
  try {
    task();
  } catch (const std::exception& error) {
    keep_error(device, error);
  }
}

}  // namespace

void Marker::set() {
  std::lock_guard<std::mutex> lock(mutex_);
  set_ = true;
  at_ = std::chrono::steady_clock::now();
  is_set_.notify_all();
}

WithoutGil::WithoutGil() : thread_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
WithoutGil::~WithoutGil() {
  if (thread_) PyEval_RestoreThread(static_cast<PyThreadState*>(thread_));
}

void Marker::refuse_if_captured() const {
  if (capture) capture->refuse("operation not permitted on an event last recorded in a capturing stream");
}

void Marker::wait() {
  refuse_if_captured();
  WithoutGil released;
  std::unique_lock<std::mutex> lock(mutex_);
  is_set_.wait(lock, [this] { return set_; });
}

bool Marker::query() {
  refuse_if_captured();
  std::lock_guard<std::mutex> lock(mutex_);
  return set_;
}

std::chrono::steady_clock::time_point Marker::set_at() {
  std::lock_guard<std::mutex> lock(mutex_);
  return at_;
}

void StreamQueue::run() {
  // Autograd and autocast have acted in the caller's thread.
  c10::impl::ExcludeDispatchKeyGuard below_autograd(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
  c10::AutoGradMode no_grad(false);
  while (true) {
    Task task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      not_empty_.wait(lock, [this] { return !tasks_.empty(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    run_task(device, std::move(task.run), task.delay);
    task.run = nullptr;  // what it keeps is freed before anybody hears that it has ended
    std::lock_guard<std::mutex> lock(mutex_);
    ++num_ended_;
    ended_.notify_all();
  }
}

// Delays are drawn when a kernel is queued, so that the same calls in the same order get the same delays.
std::chrono::microseconds StreamQueue::draw_delay() {
  use_seed();
  int64_t longest = settings::delay_us;
  if (longest <= 0 || static_cast<int64_t>(random_() % 100) >= settings::delay_percent) return {};
  int64_t drawn = static_cast<int64_t>(random_() % longest);
  ++num_delayed_;
  delayed_us_ += drawn;
  return std::chrono::microseconds(drawn);
}

void StreamQueue::use_seed() {
  if (seeded_ == num_seeds_set) return;
  seeded_ = num_seeds_set;
  std::seed_seq seed{uint64_t(settings::seed), uint64_t(device), uint64_t(id)};
  random_.seed(seed);
  num_delayed_ = delayed_us_ = 0;
}

void StreamQueue::put(std::function<void()> task, Kind kind) {
  refuse_bad_fork();
  is_used = true;
  initialize_context(device);
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (capture_ && kind != Kind::kOutside) return capture_->append(std::move(task), kind);
    number = push(std::move(task), kind == Kind::kKernel ? draw_delay() : std::chrono::microseconds(0));
  }
  if (settings::blocking && kind == Kind::kKernel) wait_until(number);
}

// The mutex is held by who calls this.
uint64_t StreamQueue::push(std::function<void()> task, std::chrono::microseconds delay) {
  if (!started_) {
    started_ = true;
    std::thread([this] { run(); }).detach();
  }
  tasks_.push_back({std::move(task), delay});
  not_empty_.notify_one();
  return ++num_queued_;
}

MarkerPtr StreamQueue::mark(Kind kind) {
  auto marker = std::make_shared<Marker>(kind == Kind::kOutside ? nullptr : capture());
  if (!marker->capture) put([marker] { marker->set(); }, kind);
  return marker;
}

void StreamQueue::wait_for(MarkerPtr marker) {
  CapturePtr now = capture();
  if (now == marker->capture) {
    if (!now) put([marker] { marker->wait(); }, Kind::kOrder);
    return;  // in a capture it is a point of this stream, whose order is the graph's
  }
  if (now) now->refuse("dependency created on uncaptured work in another stream");
  marker->capture->refuse("queued does not simulate a second stream that joins a capture, or waits for its events");
}

bool StreamQueue::begin_capture(CapturePtr capture) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (capture_) return false;
  capture_ = std::move(capture);
  ++num_captures;
  return true;
}

void StreamQueue::end_capture() {
  std::lock_guard<std::mutex> lock(mutex_);
  capture_ = nullptr;
  --num_captures;
}

CapturePtr StreamQueue::capture() {
  std::lock_guard<std::mutex> lock(mutex_);
  return capture_;
}

// One task, which runs copies of those that were recorded: they change what they have.
void StreamQueue::replay(RecordingPtr recording, std::vector<uint64_t> seeds) {
  refuse_bad_fork();
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::chrono::microseconds> delays;
    for (const auto& task : recording->tasks) {
      delays.push_back(task.kind == Kind::kKernel ? draw_delay() : std::chrono::microseconds(0));
    }
    auto run_all = [recording, seeds = std::move(seeds), delays = std::move(delays), device = device] {
      recording->seed(seeds);
      for (size_t i = 0; i < delays.size(); ++i) run_task(device, recording->tasks[i].run, delays[i]);
    };
    number = push(std::move(run_all), std::chrono::microseconds(0));
  }
  if (settings::blocking) wait_until(number);
}

void StreamQueue::wait_until(uint64_t number) {
  WithoutGil released;
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.wait(lock, [&] { return num_ended_ >= number; });
}

void StreamQueue::synchronize() {
  refuse_bad_fork();
  if (CapturePtr now = capture()) now->refuse(kNotPermitted);
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    number = num_queued_;
  }
  wait_until(number);
}

bool StreamQueue::is_idle() {
  if (CapturePtr now = capture()) now->refuse(kNotPermitted);
  std::lock_guard<std::mutex> lock(mutex_);
  return num_ended_ == num_queued_;
}

bool StreamQueue::has_started() {
  std::lock_guard<std::mutex> lock(mutex_);
  return started_;
}

std::pair<int64_t, int64_t> StreamQueue::delays() {
  std::lock_guard<std::mutex> lock(mutex_);
  use_seed();
  return {num_delayed_, delayed_us_};
}

StreamQueue& queue(int device, int64_t stream) {
  static StreamQueue* all = make_queues();  // never freed: their threads run until the process ends
  return all[device * kStreamsPerDevice + stream];
}
StreamQueue& queue(const c10::Stream& stream) { return queue(stream.device_index(), stream.id()); }
StreamQueue& current_queue(int device) { return queue(device, this_stream[device]); }

int current_device() { return this_device; }
int device_or_current(int device) { return device < 0 ? this_device : device; }

void set_device(int device) {
  check_device(device);
  if (device != this_device) initialize_context(device);
  this_device = device;
}
void set_device_without_context(int device) { this_device = device; }

int64_t current_stream(int device) { return this_stream[device]; }
int64_t exchange_stream(int device, int64_t stream) { return std::exchange(this_stream[device], stream); }
int64_t next_stream_of_pool(int device) { return 1 + num_streams_given[device]++ % (kStreamsPerDevice - 1); }

void check_device(int device) {
  TORCH_CHECK(device >= 0 && device < settings::num_devices, "queued error: invalid device ordinal ", device);
}
void initialize_context(int device) { contexts[device] = true; }
bool has_context(int device) { return contexts[device]; }
bool is_anything_captured() { return num_captures > 0; }

void raise_error(int device) {
  std::string text;
  {
    std::lock_guard<std::mutex> lock(errors_mutex);
    std::swap(text, errors[device]);
  }
  TORCH_CHECK(text.empty(), "queued error (asynchronous, of an earlier call): ", text);
}

void synchronize_device(int device) {
  for (int64_t stream = 0; stream < kStreamsPerDevice; ++stream) {
    if (!queue(device, stream).capture()) queue(device, stream).synchronize();
  }
}

void free_after_all_streams(int device, void* memory) {
  std::shared_ptr<void> kept(memory, std::free);  // until the last of the tasks has it no longer
  for (int64_t stream = 0; stream < kStreamsPerDevice; ++stream) {
    if (queue(device, stream).has_started()) queue(device, stream).put([kept] {}, Kind::kOutside);
  }
}

void set_seed(uint64_t seed) {
  settings::seed = seed;
  ++num_seeds_set;
}

bool is_in_bad_fork() { return bad_fork; }

}  // namespace queued
