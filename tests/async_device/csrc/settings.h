// The variables of the environment, QUEUED_..., and their values: tests change most of them while a process runs.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace queued {

constexpr int kMaxDevices = 16;

inline int64_t from_environment(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::atoll(value) : otherwise;
}

// When memory that was freed is overwritten with NaN, in the order of the stream that allocated it.
enum Poison : int {
  kNever = 0,
  kWhenFree = 1,    // as soon as it may be reused: stricter than CUDA, and finds a missing record_stream sooner
  kWhenReused = 2,  // as the next owner of the memory would on CUDA
};

namespace settings {
inline const int num_devices =
    static_cast<int>(std::min<int64_t>(kMaxDevices, from_environment("QUEUED_DEVICES", 2)));
inline std::atomic<int64_t> delay_us{from_environment("QUEUED_DELAY_US", 0)};            // the longest of a kernel
inline std::atomic<int64_t> delay_percent{from_environment("QUEUED_DELAY_PERCENT", 30)};  // of kernels: are delayed
inline std::atomic<uint64_t> seed{static_cast<uint64_t>(from_environment("QUEUED_SEED", 1))};  // of the delays
inline std::atomic<bool> blocking{from_environment("QUEUED_BLOCKING", 0) != 0};  // a kernel ends before its call does
inline std::atomic<int> poison{static_cast<int>(from_environment("QUEUED_POISON", kWhenFree))};
inline std::atomic<int64_t> memory_bytes{from_environment("QUEUED_MEMORY_MIB", 4096) << 20};  // of each device
inline std::atomic<int64_t> link_mb_per_s{from_environment("QUEUED_LINK_MB_PER_S", 0)};  // each way; 0: takes no time
inline const bool print_why = from_environment("QUEUED_WHY", 0) != 0;                    // why a call was not queued
inline const bool print_errors = from_environment("QUEUED_PRINT_ERRORS", 1) != 0;        // as soon as a kernel fails
}  // namespace settings

}  // namespace queued
