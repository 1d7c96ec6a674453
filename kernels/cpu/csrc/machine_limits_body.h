// The limits in the terms of matmul_lanes_*.h, which the file includes first.
#include "machine_limits.h"

namespace triptych {
namespace {

uint64_t multiply_adds_lanes(uint64_t rounds) {
  constexpr int kChains = kWideRows * kWidePanels;  // as many sums as the kernels keep
  static const int16_t kOnes[2 * kPanelRows] = {1, 1, 1};
  Words words = load_words(kOnes);
  const Pair pair = broadcast_pair(kOnes);
  Sums sums[kChains];
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) sums[i] = all_sums(0);
  for (uint64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) {
      touch(words);  // or else one product would do for all sums
      sums[i] = dot(sums[i], words, pair);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) touch(sums[i]);
  return rounds * kChains * kPanelRows * 2;
}

int32_t read_lanes(const uint8_t* bytes, size_t size) {
  Sums a = all_sums(0), b = all_sums(0);
  for (size_t i = 0; i < size; i += 256) {
    a = add(add(a, load_words(bytes + i)), load_words(bytes + i + 64));
    b = add(add(b, load_words(bytes + i + 128)), load_words(bytes + i + 192));
  }
  return total(add(a, b));
}

}  // namespace
}  // namespace triptych
