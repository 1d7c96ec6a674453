// Sixteen float lanes in plain C++: the meaning that lanes_avx2.h and lanes_avx512.h share.
// Included by one file per op and instruction set, before that op's *_body.h.
//
// Everything here has internal linkage: files compiled with AVX flags must not lend the linker a
// copy of an inline function that others use.
#pragma once
#include <stdint.h>

namespace triptych {
namespace {

// Tile sizes that fit the registers; they never change a result.
constexpr int kTileRows = 2;
constexpr int kTileVectors = 1;

struct Lanes {
  float lane[16];
};

template <typename F>
inline Lanes each_lane(F f) {
  Lanes out;
  for (int i = 0; i < 16; ++i) out.lane[i] = f(i);
  return out;
}

inline Lanes set1(float x) {
  return each_lane([=](int) { return x; });
}
inline Lanes load(const float* from) {
  return each_lane([=](int i) { return from[i]; });
}
inline Lanes load(const uint16_t* from) {  // bfloat16
  return each_lane([=](int i) {
    const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
  });
}
inline Lanes load(const int8_t* from) {
  return each_lane([=](int i) { return static_cast<float>(from[i]); });
}
// Lanes at and after `count` are zero and their memory is not touched.
inline Lanes load_part(const float* from, int count) {
  return each_lane([=](int i) { return i < count ? from[i] : 0.0f; });
}
inline void store(float* to, const Lanes& a) {
  for (int i = 0; i < 16; ++i) to[i] = a.lane[i];
}
// As bfloat16, to nearest and even; NaN stays NaN.
inline void store(uint16_t* to, const Lanes& a) {
  for (int i = 0; i < 16; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, &a.lane[i], sizeof bits);
    const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    to[i] = static_cast<uint16_t>(nan ? bits >> 16 | 0x40u
                                      : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
  }
}
inline void store_part(float* to, const Lanes& a, int count) {
  for (int i = 0; i < count; ++i) to[i] = a.lane[i];
}
inline Lanes add(const Lanes& a, const Lanes& b) {
  return each_lane([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline Lanes sub(const Lanes& a, const Lanes& b) {
  return each_lane([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline Lanes mul(const Lanes& a, const Lanes& b) {
  return each_lane([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline Lanes div(const Lanes& a, const Lanes& b) {
  return each_lane([&](int i) { return a.lane[i] / b.lane[i]; });
}
inline Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
  return each_lane([&](int i) { return __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]); });
}
inline Lanes negated_fma(const Lanes& a, const Lanes& b, const Lanes& c) {  // c - a * b
  return each_lane([&](int i) { return __builtin_fmaf(-a.lane[i], b.lane[i], c.lane[i]); });
}
// b where the two do not compare, as x86 has it: a NaN in b is kept.
inline Lanes max(const Lanes& a, const Lanes& b) {
  return each_lane([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Lanes min(const Lanes& a, const Lanes& b) {
  return each_lane([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
// `a` in lanes [begin, end), `otherwise` elsewhere.
inline Lanes within(const Lanes& a, int begin, int end, float otherwise) {
  return each_lane([&](int i) { return i >= begin && i < end ? a.lane[i] : otherwise; });
}
// a times two to the power that the low byte of `power`'s bits holds (float exponents added).
inline Lanes times_power(const Lanes& a, const Lanes& power) {
  return each_lane([&](int i) {
    uint32_t bits, exponent;
    __builtin_memcpy(&bits, &a.lane[i], sizeof bits);
    __builtin_memcpy(&exponent, &power.lane[i], sizeof exponent);
    bits += exponent << 23;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
  });
}
inline float first(const Lanes& a) { return a.lane[0]; }
inline float sum(const Lanes& a) {
  float part[8];
  for (int i = 0; i < 8; ++i) part[i] = a.lane[i] + a.lane[i + 8];
  for (int width = 4; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) part[i] += part[i + width];
  return part[0];
}
inline float peak(const Lanes& a) {
  float best = a.lane[0];
  for (int i = 1; i < 16; ++i) best = best > a.lane[i] ? best : a.lane[i];
  return best;
}

}  // namespace
}  // namespace triptych
