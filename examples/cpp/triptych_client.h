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
// what it held within one step.

#pragma once

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "triptych/v1/inference.grpc.pb.h"

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

// Exponential back-off with jitter, never before the time that the engine asked for.
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
};

// The pieces of one answer. Read from one thread; Cancel from any.
template <class Response>
class Stream {
 public:
  using Reader = std::unique_ptr<grpc::ClientReader<Response>>;
  using Opening = std::function<Reader(grpc::ClientContext*)>;
  static constexpr Milliseconds kCancelNoticed{50};  // within this, between two attempts

  Stream(std::shared_ptr<grpc::Channel> channel, Opening opening, Deadline deadline,
         RetryPolicy retry)
      : state_(std::make_unique<State>()),
        channel_(std::move(channel)),
        opening_(std::move(opening)),
        deadline_(deadline),
        retry_(retry) {
    Open();
  }
  Stream(Stream&&) noexcept = default;
  ~Stream() {
    if (state_ == nullptr) return;  // moved from
    Cancel();
    Finish();
  }

  // The next piece; false at the end. A call that was refused before it brought anything is sent
  // again as the policy says. Throws Error, with CANCELLED after Cancel.
  bool Read(Response* response) {
    while (!ended_) {
      if (reader_->Read(response)) {
        received_ = true;
        return true;
      }
      const grpc::Status status = Finish();
      if (status.ok()) break;
      Wait(Error(status));
      Open();
    }
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
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->context = std::make_unique<grpc::ClientContext>();
    if (deadline_) state_->context->set_deadline(*deadline_);
    if (state_->cancelled) state_->context->TryCancel();
    reader_ = opening_(state_->context.get());
    ended_ = false;
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
    const auto wait = received_ ? std::nullopt : retry_.Wait(++failures_, error);
    auto now = std::chrono::system_clock::now();
    if (!wait || (deadline_ && now + *wait >= *deadline_)) throw error;
    // Not asleep: a channel connects again only while somebody waits for something of it.
    for (const auto end = now + *wait; now < end && !state_->cancelled;
         now = std::chrono::system_clock::now()) {
      channel_->WaitForStateChange(channel_->GetState(true), std::min(end, now + kCancelNoticed));
    }
    if (state_->cancelled) throw Error(grpc::Status(grpc::StatusCode::CANCELLED, "cancelled"));
  }

  std::unique_ptr<State> state_;
  std::shared_ptr<grpc::Channel> channel_;
  Opening opening_;
  Deadline deadline_;
  RetryPolicy retry_;
  Reader reader_;
  bool received_ = false;
  bool ended_ = true;
  int failures_ = 0;
};

// Many requests on one stream: the cheap form for sidecars. Start and Cancel from any thread; Next
// from one. Not movable: hold it where it is made.
class Session {
 public:
  explicit Session(v1::InferenceService::Stub* stub);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session();

  // Returns the request's id, which its events carry. Throws Error when the stream has broken.
  uint64_t Start(const v1::GenerateRequest& request);
  uint64_t Start(const v1::ChatRequest& request);
  // The request ends with FINISH_REASON_ABORT.
  void Cancel(uint64_t id);
  // No more requests; those that run end, then Next returns false.
  void Close();
  // The next event of any request. An `error` event ends its request only. Throws Error when the
  // whole stream breaks: then all of its requests are gone.
  bool Next(v1::SessionEvent* event);

 private:
  void Write(const v1::SessionRequest& request);

  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionResponse>> stream_;
  std::mutex writing_;
  bool closed_ = false;
  std::atomic<uint64_t> last_id_{0};
  std::deque<v1::SessionEvent> events_;
  bool finished_ = false;
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
