// Which panels of a matrix a thread multiplies: the same ones in every step, so that they can lie
// in memory that is near it.
#pragma once
#include <vector>

namespace triptych {

struct Span {
  int begin, end;
};

// Panels whose outputs fill a block of columns: a cut of the gate and up products at multiples of
// this lets each thread round its own outputs for the product that follows.
constexpr int kGatePanels = 2;

// The thread's part of `count` things, cut at multiples of `unit`.
Span share(int count, int thread, int threads, int unit = 1);

// What of `mine`, a part of a run of panels over several matrices, lies in the matrix whose
// `panels` begin at `first` of the run: its own panels, maybe none.
Span part_of_run(Span mine, int first, int panels);

// By thread, then by matrix: the panels of matrices that are multiplied as one run.
std::vector<std::vector<Span>> panel_shares(const std::vector<int>& panels, int threads, int unit);

}  // namespace triptych
