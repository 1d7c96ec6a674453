// What the sampler needs from an instruction set. Included by the files that are compiled with AVX
// flags, so: no inline functions, no standard library beyond C's (the linker may keep one file's
// copy of an inline function for every caller).
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace triptych {

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u;
constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u;
constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85u;

constexpr size_t kMassBlock = 256;    // logits per call of `masses`
constexpr int kMassBins = 1024;       // bins of distance from the peak, 32 to a nat
constexpr uint32_t kNoiseBlock = 64;  // ids per block of `next_candidates`

// The largest logit of a row and the lowest id that has it. `valid`: neither NaN nor +inf anywhere.
struct Peak {
  float value;
  uint32_t id;
  bool valid;
};

// Sums over a row's finite logits, of center - logit and of its square, in float64: sixteen partial
// sums (logit i goes to sum i % 16), added in their order at the end. The same bits everywhere.
struct Spread {
  double sum;
  double squares;
};

// A row whose noise is to be searched. The float32 fields only serve to bound scores from above.
struct NoiseRow {
  const float* logits;
  uint32_t size;
  float peak;
  float slope;  // log2(e) * 2^23 / temperature, clamped to a finite value
  uint32_t key[2];
  uint32_t choice;
  uint32_t position;
};

// Polynomial of 2^-x on [-1/2, 1/2]: (-ln 2)^i / i!, relative error 1e-14.
constexpr double kExp2Negative[12] = {1.0,
                                      -0.6931471805599453,
                                      0.2402265069591007,
                                      -0.05550410866482158,
                                      0.009618129107628477,
                                      -0.0013333558146428441,
                                      0.0001540353039338161,
                                      -1.5252733804059838e-05,
                                      1.3215486790144305e-06,
                                      -1.0178086009239696e-07,
                                      7.054911620801121e-09,
                                      -4.4455382718708101e-10};
constexpr double kLog2E = 1.4426950408889634;
constexpr double kTwoPow44 = 17592186044416.0;
constexpr double kTwoPow52 = 4503599627370496.0;

struct SamplerKernels {
  // size > 0.
  Peak (*peak)(const float* logits, size_t size);

  // For kMassBlock logits: mass[i] = floor(2^44 * exp(-(peak - logits[i]) * inverse_temperature))
  // in the arithmetic of sampler_body.h (same bits for every instruction set), and bin[i] =
  // min(kMassBins - 1, trunc((float(peak) - logits[i]) * bin_scale)).
  void (*masses)(const float* logits, double peak, double inverse_temperature, float bin_scale,
                 uint64_t* mass, int32_t* bin);

  // Writes the ids >= *next with low <= logit < high, ascending, until the row ends or fewer than
  // 16 places are left of `capacity`; *next is where to go on. Returns how many were written.
  size_t (*collect)(const float* logits, size_t size, float low, float high, size_t* next,
                    uint32_t* ids, size_t capacity);

  // Finds the first block of kNoiseBlock ids at or after *block (a multiple of kNoiseBlock) in
  // which some id may score `best` or more and has a logit of at least `cut`. Bit i of *mask: id
  // *block + i may. False when no whole block is left; the last size % kNoiseBlock ids are the
  // caller's.
  bool (*next_candidates)(const NoiseRow& row, float cut, float best, uint32_t* block,
                          uint64_t* mask);

  // How many logits are larger than `value`.
  size_t (*count_above)(const float* logits, size_t size, float value);

  // Of a row without NaN and +inf.
  Spread (*spread)(const float* logits, size_t size, double center);
};

extern const SamplerKernels kSamplerScalar;
extern const SamplerKernels kSamplerAvx2;
extern const SamplerKernels kSamplerAvx512;

}  // namespace triptych
