// A small client of Triptych's InferenceService: RAII over grpc++, synchronous, C++17.
//
//   triptych::Client client("127.0.0.1:50051");
//   triptych::v1::GenerateRequest request;
//   request.set_text("Once upon a time");
//   auto stream = client.Generate(request);
//   triptych::v1::GenerateResponse piece;
//   while (stream.Read(&piece)) std::cout << piece.text() << std::flush;
//
// Requests and responses are the generated messages of protos/triptych/v1. Whatever fails throws
// triptych::Error. A stream or session that goes out of scope is cancelled, and the engine frees
// what it held within one step. An answer whose connection breaks goes on over the next one.

#pragma once

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "triptych/v1/inference.grpc.pb.h"
#include "triptych_received.h"

namespace triptych {

using Milliseconds = std::chrono::milliseconds;
using Deadline = std::optional<std::chrono::system_clock::time_point>;

// A call that ended without its whole answer.
class Error : public std::runtime_error {
 public:
  // From gRPC's status and the google.rpc.Status in its details.
  explicit Error(const grpc::Status& status);
  // From what a session says of one of its requests.
  explicit Error(const v1::SessionError& error);

  grpc::StatusCode code() const { return code_; }
  // The field that is out of its bound, for INVALID_ARGUMENT; else empty.
  const std::string& field() const { return field_; }
  // How long to wait before the same request has a chance, where the engine said so.
  std::optional<Milliseconds> retry_after() const { return retry_after_; }
  // UNAVAILABLE always; RESOURCE_EXHAUSTED when it carries RetryInfo.
  bool retryable() const;

 private:
  Error(grpc::StatusCode code, const std::string& message, const std::string& details);

  grpc::StatusCode code_;
  std::string field_;
  std::optional<Milliseconds> retry_after_;
};

// After the connection broke, the engine told the answer differently (DATA_LOSS): it cannot be gone
// on with.
class ResumeMismatch : public Error {
 public:
  explicit ResumeMismatch(const std::string& what)
      : Error(grpc::Status(grpc::StatusCode::DATA_LOSS, what)) {}
};

// Exponential back-off with jitter, never before the time that the engine asked for. Counted are
// failures in a row that brought nothing new.
struct RetryPolicy {
  int attempts = 8;
  Milliseconds first_wait{100};
  Milliseconds longest_wait{5000};
  Milliseconds longest_retry_after{30000};

  // After so many failures in a row, from 1; none: give up.
  std::optional<Milliseconds> Wait(int failures, const Error& error) const;
};

struct Options {
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  std::string authority;  // of the calls; empty: the address
  Milliseconds keepalive{20000};
  RetryPolicy retry;
  // Go on with an answer whose connection breaks: requests without a seed get one.
  bool resume = true;
};

// Between two attempts: so long, or until the connection is there again. Ends soon after
// `cancelled`.
void WaitToReconnect(grpc::Channel* channel, Milliseconds wait, const Error& error,
                     const std::atomic<bool>& cancelled);

// What a stream ended with that said OK too early.
grpc::Status CutOff();

// The pieces of one answer. Read from one thread; Cancel from any.
template <class Response>
class Stream {
 public:
  using Reader = std::unique_ptr<grpc::ClientReader<Response>>;
  // Begins an attempt, so long after the first one.
  using Opening = std::function<Reader(grpc::ClientContext*, Milliseconds)>;

  Stream(std::shared_ptr<grpc::Channel> channel, Opening opening, Deadline deadline,
         const Options& options)
      : state_(std::make_unique<State>()),
        channel_(std::move(channel)),
        opening_(std::move(opening)),
        deadline_(deadline),
        retry_(options.retry),
        resume_(options.resume) {
    Open();
  }
  Stream(Stream&&) noexcept = default;
  ~Stream() {
    if (state_ == nullptr) return;  // moved from
    Cancel();
    Finish();
  }

  // The next piece; false at the end. A call that was refused, or whose connection broke, is sent
  // again as the policy says, and what comes again is left out. Throws Error, with CANCELLED after
  // Cancel.
  bool Read(Response* response) {
    while (!ended_ && !received_.complete()) {
      if (reader_->Read(response)) {
        if (!Take(response)) continue;
        failures_ = 0;
        return true;
      }
      const grpc::Status status = Finish();
      Wait(status.ok() ? Error(CutOff()) : Error(status));
      Open();
    }
    Finish();
    return false;
  }

  void Cancel() {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->cancelled = true;
    if (state_->context) state_->context->TryCancel();
  }

 private:
  // What Cancel touches, at an address that stays when the stream moves.
  struct State {
    std::mutex mutex;
    std::atomic<bool> cancelled{false};
    std::unique_ptr<grpc::ClientContext> context;
  };

  void Open() {
    using std::chrono::duration_cast;
    const auto spent = duration_cast<Milliseconds>(std::chrono::steady_clock::now() - began_);
    {
      std::lock_guard<std::mutex> lock(state_->mutex);
      state_->context = std::make_unique<grpc::ClientContext>();
      if (deadline_) state_->context->set_deadline(*deadline_);
      if (state_->cancelled) state_->context->TryCancel();
    }
    // Which waits for a connection that is being made: Cancel must not wait as well.
    reader_ = opening_(state_->context.get(), spent);
    ended_ = false;
  }

  // Whether anything of it is new.
  bool Take(Response* response) {
    if (!resume_) {
      received_.PassOn(*response);
      return true;
    }
    try {
      return received_.Take(response);
    } catch (const ResumeMismatch&) {  // nothing more of such an answer is read
      Cancel();
      Finish();
      throw;
    }
  }

  // Ends the call, for good unless it is opened again.
  grpc::Status Finish() {
    if (ended_) return grpc::Status::OK;
    ended_ = true;
    for (Response unread; reader_->Read(&unread);) {
    }
    const grpc::Status status = reader_->Finish();
    std::lock_guard<std::mutex> lock(state_->mutex);
    reader_.reset();
    state_->context.reset();
    return status;
  }

  void Wait(const Error& error) {
    const bool again = resume_ || !received_.any();
    const auto wait = again ? retry_.Wait(++failures_, error) : std::nullopt;
    if (!wait || (deadline_ && std::chrono::system_clock::now() + *wait >= *deadline_)) throw error;
    WaitToReconnect(channel_.get(), *wait, error, state_->cancelled);
    if (state_->cancelled) throw Error(grpc::Status(grpc::StatusCode::CANCELLED, "cancelled"));
    received_.Again();
  }

  std::unique_ptr<State> state_;
  std::shared_ptr<grpc::Channel> channel_;
  Opening opening_;
  Deadline deadline_;
  RetryPolicy retry_;
  bool resume_;
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  Received received_;
  Reader reader_;
  bool ended_ = true;
  int failures_ = 0;
};

// Many requests on one stream: the cheap form for sidecars. Start and Cancel from any thread; Next
// from one. When the stream breaks, Next has all requests started again and goes on with their
// answers. Not movable: hold it where it is made.
class Session {
 public:
  Session(std::shared_ptr<grpc::Channel> channel, v1::InferenceService::Stub* stub,
          const Options& options);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session();

  // Returns the request's id, which its events carry. Throws Error when the session has ended.
  uint64_t Start(const v1::GenerateRequest& request);
  uint64_t Start(const v1::ChatRequest& request);
  // The request ends with FINISH_REASON_ABORT.
  void Cancel(uint64_t id);
  // No more requests; those that run end, then Next returns false.
  void Close();
  // The next event of any request. An `error` event ends its request only; one with DATA_LOSS is
  // what ResumeMismatch is of a stream. Throws Error when the session cannot go on: then all of its
  // requests are gone.
  bool Next(v1::SessionEvent* event);

 private:
  using Clock = std::chrono::steady_clock;
  using Requests = grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionResponse>;

  // A request that has not ended, and what it takes to send it again. Only where that is wanted.
  struct Running {
    v1::SessionStart start;
    Clock::time_point began;
    Received received;
    bool cancelled = false;
    bool again = false;  // it has been started again
    int failures = 0;    // since then, in a row
  };

  uint64_t Start(v1::SessionStart start);
  void Open();
  bool Take(v1::SessionEvent* event);
  bool TakeOutput(v1::SessionEvent* event);
  void GoOn(const grpc::Status& status);
  v1::SessionRequest StartAgain(Running* running, Milliseconds wait);
  void SendDue();
  void SendNext();
  bool IsUnsent() const;

  const std::shared_ptr<grpc::Channel> channel_;
  v1::InferenceService::Stub* const stub_;
  const RetryPolicy retry_;
  const bool resume_;

  std::mutex writing_;  // of the stream; taken before mutex_
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<Requests> stream_;
  bool closed_ = false;
  uint64_t last_id_ = 0;

  std::mutex mutex_;  // of the following
  std::map<uint64_t, Running> running_;
  Clock::time_point opened_;
  // What Next has to say, and when. A thread sends it: Next itself must read meanwhile, as the
  // engine takes no more where too much of what it says is not read.
  std::multimap<Clock::time_point, v1::SessionRequest> due_;
  std::condition_variable due_changed_;
  bool leaving_ = false;
  std::thread sender_;  // from the first break on

  // Next's alone.
  std::deque<v1::SessionEvent> events_;
  int failures_ = 0;
  std::atomic<bool> finished_{false};
};

// One channel to an engine; from any thread.
class Client {
 public:
  explicit Client(const std::string& address, Options options = {});

  // `timeout`: for everything, retries included.
  Stream<v1::GenerateResponse> Generate(v1::GenerateRequest request,
                                        std::optional<Milliseconds> timeout = std::nullopt);
  Stream<v1::ChatResponse> Chat(v1::ChatRequest request,
                                std::optional<Milliseconds> timeout = std::nullopt);
  std::unique_ptr<Session> OpenSession();
  std::vector<uint32_t> Tokenize(const std::string& text);

 private:
  Options options_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::InferenceService::Stub> stub_;
};

}  // namespace triptych
