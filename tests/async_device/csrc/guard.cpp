// Which device, stream and event? The interface through which torch asks, and through which autograd's threads work.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "graphs.h"
#include "memory.h"
#include "streams.h"

namespace queued {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

struct Event {
  MarkerPtr marker;
  bool has_timing;
  int device;
};

// The generic event of torch goes to its device and back. On CUDA the way back makes a context on the device that was
// current before, even if nothing has used that device.
class OnEventsDevice {
 public:
  explicit OnEventsDevice(int device) : before_(current_device()) { set_device(device); }
  ~OnEventsDevice() { set_device(before_); }

 private:
  int before_;
};

Stream make_stream(int device, int64_t id) { return Stream(Stream::UNSAFE, Device(kDevice, device), id); }

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }

  Device exchangeDevice(Device device) const override {
    int before = current_device();
    set_device(device.index());
    return Device(kDevice, before);
  }
  Device getDevice() const override { return Device(kDevice, current_device()); }
  void setDevice(Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { set_device_without_context(device.index()); }
  DeviceIndex deviceCount() const noexcept override { return is_in_bad_fork() ? 0 : settings::num_devices; }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

  Stream getStream(Device device) const override {
    int index = device_or_current(device.index());
    return make_stream(index, current_stream(index));
  }
  Stream getDefaultStream(Device device) const override { return make_stream(device_or_current(device.index()), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    int index = device_or_current(device.index());
    check_device(index);
    return make_stream(index, next_stream_of_pool(index));
  }
  Stream exchangeStream(Stream stream) const override {
    return make_stream(stream.device_index(), exchange_stream(stream.device_index(), stream.id()));
  }
  bool queryStream(const Stream& stream) const override { return queue(stream).is_idle(); }
  void synchronizeStream(const Stream& stream) const override {
    queue(stream).synchronize();
    raise_error(stream.device_index());
  }
  void synchronizeDevice(DeviceIndex device) const override {
    OnEventsDevice on(device_or_current(device));
    refuse_device_synchronization(current_device());
    synchronize_device(current_device());
    raise_error(current_device());
  }

  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    if (!event) return;
    OnEventsDevice on(static_cast<Event*>(event)->device);
    delete static_cast<Event*>(event);
  }
  void record(void** event, const Stream& stream, DeviceIndex device, c10::EventFlag flag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "Event device index ", int(device),
                " does not match recording stream's device index ", int(stream.device_index()), ".");
    OnEventsDevice on(stream.device_index());
    if (!*event) *event = new Event{nullptr, flag == c10::EventFlag::BACKEND_DEFAULT, stream.device_index()};
    static_cast<Event*>(*event)->marker = queue(stream).mark();
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;  // never recorded: as on CUDA there is nothing to wait for
    OnEventsDevice on(stream.device_index());
    queue(stream).wait_for(static_cast<Event*>(event)->marker);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    refuse_if_unsafe();
    return static_cast<Event*>(event)->marker->query();
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    static_cast<Event*>(event)->marker->wait();
    raise_error(static_cast<Event*>(event)->device);
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    TORCH_CHECK(first && second, "Both events must be recorded before calculating elapsed time.");
    auto *from = static_cast<Event*>(first), *to = static_cast<Event*>(second);
    TORCH_CHECK(from->has_timing && to->has_timing, "Both events must be created with argument 'enable_timing=True'.");
    TORCH_CHECK(from->marker->query() && to->marker->query(),
                "Both events must be completed before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(to->marker->set_at() - from->marker->set_at()).count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    DeviceAllocator::get().recordStream(data, stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl)

}  // namespace
}  // namespace queued
