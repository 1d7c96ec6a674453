// What the sampler needs of an instruction set besides its lanes, in plain C++: the meaning that
// sampler_lanes_avx2.h and sampler_lanes_avx512.h share. Included after lanes_scalar.h.
#pragma once
#include "philox.h"

namespace triptych {
namespace {

// Whether any pair of lanes did not compare, which takes a NaN.
struct Unordered {
  bool found = false;

  void note(const Lanes& a, const Lanes& b) {
    for (int i = 0; i < 16; ++i) found |= a.lane[i] != a.lane[i] || b.lane[i] != b.lane[i];
  }
  bool any() const { return found; }
};

// Bit i: whether it holds in lane i. Never for NaN.
inline unsigned at_least(const Lanes& a, const Lanes& b) {
  unsigned bits = 0;
  for (int i = 0; i < 16; ++i) bits |= static_cast<unsigned>(a.lane[i] >= b.lane[i]) << i;
  return bits;
}
inline unsigned below(const Lanes& a, const Lanes& b) {
  unsigned bits = 0;
  for (int i = 0; i < 16; ++i) bits |= static_cast<unsigned>(a.lane[i] < b.lane[i]) << i;
  return bits;
}
// Writes first + i for each bit i of `found`, and may write on up to 16 places; how many count.
inline size_t store_ids(uint32_t* to, uint32_t first, unsigned found) {
  size_t count = 0;
  for (; found; found &= found - 1)
    to[count++] = first + static_cast<uint32_t>(__builtin_ctz(found));
  return count;
}
inline void store_truncated(int32_t* to, const Lanes& a) {
  for (int i = 0; i < 16; ++i) to[i] = static_cast<int32_t>(a.lane[i]);
}

constexpr size_t kDoubles = 1;

struct Doubles {
  double all;
};

inline Doubles set1d(double x) { return {x}; }
inline Doubles doubles(const float* from) { return {static_cast<double>(*from)}; }
inline void store(double* to, const Doubles& a) { *to = a.all; }
inline Doubles add(const Doubles& a, const Doubles& b) { return {a.all + b.all}; }
inline Doubles sub(const Doubles& a, const Doubles& b) { return {a.all - b.all}; }
inline Doubles mul(const Doubles& a, const Doubles& b) { return {a.all * b.all}; }
// b where the two do not compare.
inline Doubles min(const Doubles& a, const Doubles& b) { return {a.all < b.all ? a.all : b.all}; }
// a where x is above -inf, else 0.
inline Doubles where_finite(const Doubles& x, const Doubles& a) {
  return {x.all > -__builtin_inf() ? a.all : 0.0};
}
// The integer part of 0 <= a < 2^52, shifted right by what the mantissa of `shift` holds.
inline void store_shifted(uint64_t* to, const Doubles& a, const Doubles& shift) {
  uint64_t bits;
  __builtin_memcpy(&bits, &shift.all, sizeof bits);
  *to = static_cast<uint64_t>(static_cast<int64_t>(a.all)) >> (bits & ((uint64_t{1} << 52) - 1));
}

constexpr uint32_t kNoiseIds = 16;  // ids per call of rest_bits

class NoiseKeys {
 public:
  explicit NoiseKeys(const NoiseRow& row) : row_(row) {}

  // For ids [id, id + kNoiseIds), id a multiple of it: the bits of float(~h >> 1) as a number,
  // where h is the id's high noise word.
  void rest_bits(uint32_t id, Lanes* out) const {
    for (uint32_t i = 0; i < kNoiseIds; i += 4) {
      const PhiloxWords words =
          philox4x32({(id + i) >> 2, 0, row_.choice, row_.position}, row_.key[0], row_.key[1]);
      for (uint32_t word = 0; word < 4; ++word) {
        const float rest = static_cast<float>(static_cast<int32_t>(~words[word] >> 1));
        int32_t bits;
        __builtin_memcpy(&bits, &rest, sizeof bits);
        out->lane[i + word] = static_cast<float>(bits);
      }
    }
  }

 private:
  const NoiseRow& row_;
};

}  // namespace
}  // namespace triptych
