#include "checksum.h"

#include <cstring>

namespace triptych {
namespace {

constexpr uint64_t kFactor = 0x9E3779B97F4A7C15u;  // odd, so that multiplying loses nothing
constexpr size_t kLanes = 8;                       // independent chains hide a multiply's latency

// One to one in either argument. The shift brings the upper bits down, which a product never does.
uint64_t step(uint64_t sum, uint64_t word) {
  sum = (sum ^ word) * kFactor;
  return sum ^ sum >> 32;
}

uint64_t word_at(const uint8_t* data, size_t count = sizeof(uint64_t)) {
  uint64_t word = 0;
  std::memcpy(&word, data, count);
  return word;
}

}  // namespace

uint64_t checksum(const uint8_t* data, size_t size) {
  constexpr size_t kRound = kLanes * sizeof(uint64_t);
  uint64_t sums[kLanes];
  for (size_t lane = 0; lane < kLanes; ++lane) sums[lane] = lane + 1;
  size_t at = 0;
  for (; at + kRound <= size; at += kRound)
    for (size_t lane = 0; lane < kLanes; ++lane)
      sums[lane] = step(sums[lane], word_at(data + at + lane * sizeof(uint64_t)));
  uint64_t sum = size;
  for (const uint64_t lane : sums) sum = step(sum, lane);
  for (; at + sizeof(uint64_t) <= size; at += sizeof(uint64_t)) sum = step(sum, word_at(data + at));
  return step(sum, word_at(data + at, size - at));
}

}  // namespace triptych
