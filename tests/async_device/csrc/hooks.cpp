#include "hooks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "graphs.h"
#include "memory.h"

namespace queued {
namespace {

using c10::Device;
using c10::DeviceIndex;

// Its state is that of the CPU's generator. Each call that draws takes one number from it, in the caller's thread, and
// draws with a CPU generator of its own, which that number seeds: so the order of the calls decides, as on CUDA.
struct GeneratorImpl final : at::CPUGeneratorImpl {
  explicit GeneratorImpl(int device) {
    device_ = Device(kDevice, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
  // A capture leaves the generator alone: it draws when it is replayed. So nothing may ask for its state, or set it.
  uint64_t current_seed() const override { return allowed().at::CPUGeneratorImpl::current_seed(); }
  uint64_t seed() override { return allowed().at::CPUGeneratorImpl::seed(); }
  void set_current_seed(uint64_t seed) override { allowed().at::CPUGeneratorImpl::set_current_seed(seed); }
  void set_state(const c10::TensorImpl& state) override { allowed().at::CPUGeneratorImpl::set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return allowed().at::CPUGeneratorImpl::get_state();
  }
  at::CPUGeneratorImpl* clone_impl() const override {
    auto* copy = new GeneratorImpl(device_.index());
    copy->set_state(*get_state());
    return copy;
  }

 private:
  template <class Self>
  static Self& allowed_of(Self& self) {
    TORCH_CHECK(!current_queue(self.device_.index()).capture(),
                "Cannot use the state of a generator of queued during graph capture");
    return self;
  }
  GeneratorImpl& allowed() { return allowed_of(*this); }
  const GeneratorImpl& allowed() const { return allowed_of(*this); }
};

struct HooksInterface final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return settings::num_devices > 0; }
  void init() const override {}
  bool hasPrimaryContext(DeviceIndex device) const override { return has_context(device); }

  DeviceIndex deviceCount() const override { return settings::num_devices; }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { set_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    int before = current_device();
    if (device >= 0) set_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    int before = current_device();
    if (device >= 0) {
      check_device(device);
      set_device_without_context(device);
    }
    return before;
  }

  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<GeneratorImpl>(device_or_current(device));
  }

  Device getDeviceFromPtr(void*) const override { return Device(kDevice, current_device()); }
  bool isPinnedPtr(const void* data) const override { return HostAllocator::get().is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &HostAllocator::get(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize_storage(storage, num_bytes);
  }
};

}  // namespace

at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < settings::num_devices; ++i) made->push_back(at::make_generator<GeneratorImpl>(i));
    return made;
  }();
  return (*all)[device_or_current(device)];
}

void register_hooks_and_allocators() {
  at::SetAllocator(kDevice, &DeviceAllocator::get());
  at::setHostAllocator(kDevice, &HostAllocator::get());
  at::RegisterPrivateUse1HooksInterface(new HooksInterface);
}

}  // namespace queued
