#include "graphs.h"

#include <ATen/CPUGeneratorImpl.h>

#include <fstream>

#include "memory.h"

namespace queued {
namespace {

std::atomic<uint64_t> num_pools_made{0};
std::atomic<int64_t> replays{0}, replayed_kernels{0};

// Calls with the generator's own implementation, under its lock.
template <class F>
auto with_lock(at::Generator generator, F&& call) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return call(static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl()));
}

}  // namespace

std::vector<uint64_t> Recording::draw_seeds() const {
  std::vector<uint64_t> seeds;
  for (const Draw& draw : draws) {
    seeds.push_back(with_lock(draw.from, [](auto* generator) { return generator->random64(); }));
  }
  return seeds;
}

void Recording::seed(const std::vector<uint64_t>& seeds) const {
  for (size_t i = 0; i < seeds.size(); ++i) {
    with_lock(draws[i].by_kernel, [&](auto* generator) { generator->set_current_seed(seeds[i]); });
  }
}

void Capture::raise_if_invalid() const {
  TORCH_CHECK(error_.empty(), "queued error: operation failed due to a previous error during capture (", error_, ")");
}

void Capture::append(std::function<void()> task, Kind kind) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (kind == Kind::kKernel) raise_if_invalid();
  if (!ended_) recording_.tasks.push_back({std::move(task), kind});
}

at::Generator Capture::draw(const at::Generator& from) {
  at::Generator by_kernel = at::detail::createCPUGenerator();
  std::lock_guard<std::mutex> lock(mutex_);
  recording_.draws.push_back({from, by_kernel});
  return by_kernel;
}

void Capture::refuse(const std::string& why) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_.empty()) error_ = why;
  }
  TORCH_CHECK(false, "queued error: ", why);
}

Recording Capture::take() {
  std::lock_guard<std::mutex> lock(mutex_);
  ended_ = true;
  return std::move(recording_);
}

void refuse_if_capturing(int device, const std::string& why) {
  if (CapturePtr capture = current_queue(device).capture()) capture->refuse(why);
}

std::vector<CapturePtr> captures_of(int device) {
  std::vector<CapturePtr> found;
  if (!is_anything_captured()) return found;
  for (int64_t stream = 1; stream < kStreamsPerDevice; ++stream) {
    if (CapturePtr capture = queue(device, stream).capture()) found.push_back(std::move(capture));
  }
  return found;
}

void refuse_if_unsafe() {
  using Mode = at::GraphCaptureMode;
  for (int device = 0; device < settings::num_devices; ++device) {
    for (const CapturePtr& capture : captures_of(device)) {
      bool is_global = capture->mode == Mode::Global || capture->mode == Mode::Default;
      bool is_own = capture->thread == std::this_thread::get_id() && capture->mode != Mode::Relaxed;
      if (is_global || is_own) capture->refuse(kNotPermitted);
    }
  }
}

void refuse_device_synchronization(int device) {
  for (const CapturePtr& capture : captures_of(device)) capture->refuse(kNotPermitted);
  refuse_if_unsafe();
}

int64_t num_replays() { return replays; }
int64_t num_replayed_kernels() { return replayed_kernels; }

namespace {

struct GraphImpl final : at::GraphImplInterface {
  explicit GraphImpl(const at::GraphImplArgs& args) : keep_graph_(args.keep_graph) {}
  ~GraphImpl() override {
    if (!is_in_bad_fork()) reset();
  }

  void capture_begin(c10::MempoolId_t pool, at::GraphCaptureMode mode) override {
    TORCH_CHECK(!capture_ && !recording_, "This graph already owns a captured graph. To capture a new graph, create a "
                                          "new instance, or reset() this one.");
    device_ = current_device();
    stream_ = current_stream(device_);
    TORCH_CHECK(stream_ != 0, "Graphs must be captured on a non-default stream. (However, after capture, it's ok to "
                              "replay them on the default stream.)");
    pool_ = pool == c10::MempoolId_t{0, 0} ? c10::MempoolId_t{++num_pools_made, 0} : pool;
    auto capture = std::make_shared<Capture>(pool_, mode);
    DeviceAllocator::get().open_pool(device_, pool_);
    if (!queue(device_, stream_).begin_capture(capture)) {
      DeviceAllocator::get().close_pool(device_, pool_);
      TORCH_CHECK(false, "queued error: ", kNotPermitted, ": it captures for another graph");
    }
    capture_ = std::move(capture);
  }

  void capture_end() override {
    TORCH_CHECK(capture_, "capture_end() without a preceding capture_begin()");
    TORCH_CHECK(current_device() == device_ && current_stream(device_) == stream_,
                "Capture must end on the same stream it began on.");
    bool may_end = capture_->thread == std::this_thread::get_id() || capture_->mode == at::GraphCaptureMode::Relaxed;
    if (!may_end) capture_->refuse("attempt to terminate a thread-local capture sequence from another thread");
    queue(device_, stream_).end_capture();
    CapturePtr capture = std::move(capture_);
    recording_ = std::make_shared<const Recording>(capture->take());
    try {
      capture->raise_if_invalid();
    } catch (...) {
      reset();
      throw;
    }
    if (!keep_graph_) instantiate();
  }

  void instantiate() override {
    TORCH_CHECK(recording_, "Called instantiate() without a preceding successful capture.");
    is_instantiated_ = true;
  }

  void replay() override {
    TORCH_CHECK(recording_, "Called replay() without a preceding successful capture.");
    if (!is_instantiated_) instantiate();
    refuse_if_capturing(device_, "queued does not simulate a graph that is replayed in another's capture");
    current_queue(device_).replay(recording_, recording_->draw_seeds());
    ++replays;
    replayed_kernels += num_kernels();
  }

  void reset() override {
    if (capture_) {
      queue(device_, stream_).end_capture();
      capture_->take();
      capture_.reset();
    } else if (!recording_) {
      return;
    }
    recording_.reset();  // what replays it still has it
    is_instantiated_ = false;
    DeviceAllocator::get().close_pool(device_, pool_);
  }

  c10::MempoolId_t pool() const override {
    TORCH_CHECK(recording_, "Called pool() without a preceding successful capture.");
    return pool_;
  }

  void enable_debug_mode() override {}
  void debug_dump(const std::string& path) override {
    TORCH_CHECK(recording_, "Called debug_dump() without a preceding successful capture.");
    std::ofstream(path) << num_kernels() << " kernels, " << recording_->draws.size() << " of which draw\n";
  }

 private:
  int64_t num_kernels() const {
    return std::count_if(recording_->tasks.begin(), recording_->tasks.end(),
                         [](const Recording::Task& task) { return task.kind == Kind::kKernel; });
  }

  const bool keep_graph_;
  int device_ = 0;
  int64_t stream_ = 0;
  c10::MempoolId_t pool_{0, 0};
  CapturePtr capture_;  // from capture_begin to capture_end
  RecordingPtr recording_;
  bool is_instantiated_ = false;
};

}  // namespace
}  // namespace queued

namespace at {
REGISTER_GRAPH_IMPL(QUEUED, queued::GraphImpl)  // the name of the device, in capitals
}
