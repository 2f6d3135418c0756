// What do the links between devices carry?
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace queued {

// The bytes that each device has sent to others, and received from them, since the last call.
std::vector<std::pair<int64_t, int64_t>> take_link_bytes();

}  // namespace queued
