// What does Python see? The module async_device.C: devices, and what tests set and ask.
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

#include "copies.h"
#include "graphs.h"
#include "hooks.h"
#include "memory.h"
#include "streams.h"
#include "tensors.h"

namespace queued {
namespace {

namespace py = pybind11;
using without_gil = py::call_guard<py::gil_scoped_release>;

py::object default_generator_object(int device) {
  return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(default_generator(device)));
}

std::map<std::string, int64_t> current_settings() {
  return {{"QUEUED_DEVICES", settings::num_devices},
          {"QUEUED_DELAY_US", settings::delay_us},
          {"QUEUED_DELAY_PERCENT", settings::delay_percent},
          {"QUEUED_SEED", static_cast<int64_t>(settings::seed)},
          {"QUEUED_BLOCKING", settings::blocking},
          {"QUEUED_POISON", settings::poison},
          {"QUEUED_MEMORY_MIB", settings::memory_bytes >> 20},
          {"QUEUED_LINK_MB_PER_S", settings::link_mb_per_s},
          {"QUEUED_WHY", settings::print_why},
          {"QUEUED_PRINT_ERRORS", settings::print_errors}};
}

std::map<std::string, std::pair<int64_t, int64_t>> counts() {
  std::map<std::string, std::pair<int64_t, int64_t>> found;
  for (auto& [operation, calls] : call_counts()) found[operation] = {calls.queued, calls.at_once};
  return found;
}

void synchronize_all() {
  for (int device = 0; device < settings::num_devices; ++device) synchronize_device(device);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  register_hooks_and_allocators();

  m.def("device_count", [] { return settings::num_devices; });
  m.def("current_device", &current_device);
  m.def("set_device", &set_device);
  m.def("has_context", &has_context);
  m.def("is_in_bad_fork", &is_in_bad_fork);
  m.def("default_generator", &default_generator_object);
  m.def("synchronize_all", &synchronize_all, without_gil());

  m.def("settings", &current_settings);
  m.def("set_seed", &set_seed);
  m.def("set_delay", [](int64_t longest_us, int64_t percent) {
    settings::delay_us = longest_us;
    settings::delay_percent = percent;
  });
  m.def("set_blocking", [](bool on) { settings::blocking = on; });
  m.def("set_poison", [](int mode) { settings::poison = mode; });
  m.def("set_memory", [](int64_t num_bytes) { settings::memory_bytes = num_bytes; });

  m.def("set_link_speed", [](int64_t mb_per_s) { settings::link_mb_per_s = mb_per_s; });
  m.def("take_link_bytes", &take_link_bytes);

  // Calls of each operation: how many were queued, and how many waited for their stream.
  m.def("counts", &counts);
  // Since the seed was set: how many kernels of a stream were delayed, and by how many microseconds in all.
  m.def("delays", [](int device, int64_t stream) { return queue(device, stream).delays(); });

  m.def("is_capturing", [](int device) { return current_queue(device).capture() != nullptr; });
  m.def("num_replays", &num_replays);
  m.def("num_replayed_kernels", &num_replayed_kernels);

  // A marker that the host sets: a stream can wait for it, and the host does not wait for the stream. Collectives are
  // made of these, and tests hold a stream back with one.
  py::class_<Marker, MarkerPtr>(m, "Marker")
      .def(py::init<>())
      .def("set", &Marker::set)
      .def("query", &Marker::query)
      .def("wait", &Marker::wait, without_gil());
  m.def("mark", [](int device) { return current_queue(device).mark(); });
  m.def("stream_waits", [](int device, MarkerPtr marker) { current_queue(device).wait_for(std::move(marker)); });
}

}  // namespace queued
