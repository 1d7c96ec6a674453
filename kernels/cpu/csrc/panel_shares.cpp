#include "panel_shares.h"

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace triptych {

Span share(int count, int thread, int threads, int unit) {
  const int64_t units = (count + unit - 1) / unit;
  const auto cut = [&](int64_t i) {
    return std::min(count, static_cast<int>(units * i / threads) * unit);
  };
  return {cut(thread), cut(int64_t{thread} + 1)};
}

Span part_of_run(Span mine, int first, int panels) {
  const int begin = std::clamp(mine.begin - first, 0, panels);
  return {begin, std::clamp(mine.end - first, begin, panels)};
}

std::vector<std::vector<Span>> panel_shares(const std::vector<int>& panels, int threads, int unit) {
  const int total = std::accumulate(panels.begin(), panels.end(), 0);
  std::vector<std::vector<Span>> out(static_cast<size_t>(threads));
  for (int thread = 0; thread < threads; ++thread) {
    int first = 0;
    for (const int count : panels) {
      out[static_cast<size_t>(thread)].push_back(
          part_of_run(share(total, thread, threads, unit), first, count));
      first += count;
    }
  }
  return out;
}

}  // namespace triptych
