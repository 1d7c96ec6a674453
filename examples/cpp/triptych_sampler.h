// Draws tokens for a Triptych engine on the same machine, from logits in shared memory: C++17,
// Linux, protobuf (and no gRPC).
//
//   triptych::Sampler sampler("/run/triptych", [](const triptych::Row& row) -> uint32_t {
//     return std::max_element(row.logits, row.logits + row.size) - row.logits;
//   });
//   sampler.Start();                                // or Serve(), in a thread of yours
//   triptych::v1::GenerateRequest request;
//   sampler.Apply(request.mutable_sampling_params());
//
// The request goes to the engine by any client. What it asks for beside the draw is as always: stop
// strings, max_tokens, streaming, cancel. protos/triptych/v1/sampler.proto says what is sent.

#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "triptych/v1/common.pb.h"

namespace triptych {

// What ended a sampler: no engine, a refusal, or rows that are not what they should be.
class SamplerError : public std::runtime_error {
 public:
  explicit SamplerError(const std::string& message, bool retryable = false)
      : std::runtime_error(message), retryable_(retryable) {}

  // Whether the same lease may be granted later.
  bool retryable() const { return retryable_; }

 private:
  bool retryable_;
};

// A token that is to be drawn.
struct Row {
  const float* logits;  // the model's own; in shared memory, until the draw returns
  size_t size;          // token ids below it may be drawn
  uint64_t tag;         // of the request, as Apply was told
  uint32_t position;    // of the token among the request's output tokens, from 0
};

struct SamplerOptions {
  // Requests that may run with it at once.
  uint32_t num_rows = 8;
  // How long the constructor tries while no engine listens, or it has no rows to give.
  std::chrono::milliseconds timeout{10000};
};

// A lease of rows, from construction on, and the loop that draws for them. Not movable.
class Sampler {
 public:
  // Called for one row after another. A position may come again, from a scheduler started anew:
  // outputs stay the same if a draw depends on nothing but its row. What it throws ends Serve.
  using Draw = std::function<uint32_t(const Row&)>;

  // Claims the lease. `run_dir`: the --run-dir of the engine, which runs as the same user. Throws
  // SamplerError.
  Sampler(const std::string& run_dir, Draw draw, SamplerOptions options = {});
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;
  ~Sampler();  // Stop; waits for Start's thread

  // Names the lease in a request's parameters. `tag` comes back with each of its rows.
  void Apply(v1::SamplingParams* params, uint64_t tag = 0) const;

  // Draws until Stop. When the connection ends, as it does with the scheduler's process, claims the
  // lease again, for as long as that takes: its requests go on then. Throws SamplerError, and what
  // the draw throws; requests of the lease end with UNAVAILABLE then. Called once.
  void Serve();
  // Serve in a thread of its own.
  void Start();
  // Waits until that thread has ended, and throws what Serve threw.
  void Join();
  // Ends Serve, from any thread and from within a draw. Requests that still run end with
  // UNAVAILABLE.
  void Stop();

 private:
  class Connection;

  std::unique_ptr<Connection> Claim(std::chrono::steady_clock::time_point deadline) const;

  const std::string path_;
  const Draw draw_;
  const SamplerOptions options_;
  const uint64_t lease_;
  const int stop_event_;
  std::atomic<bool> stopped_{false};
  std::unique_ptr<Connection> connection_;  // the first one, until Serve takes it
  std::thread thread_;
  std::exception_ptr failure_;
};

}  // namespace triptych
