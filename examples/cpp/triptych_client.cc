#include "triptych_client.h"

#include <algorithm>
#include <random>
#include <utility>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace triptych {
namespace {

Deadline DeadlineOf(std::optional<Milliseconds> timeout) {
  if (!timeout) return std::nullopt;
  return std::chrono::system_clock::now() + *timeout;
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const Options& options) {
  grpc::ChannelArguments arguments;
  // Calls take turns over all addresses of a dns:/// name: a tokenizer process each.
  arguments.SetLoadBalancingPolicyName("round_robin");
  const int keepalive = static_cast<int>(options.keepalive.count());
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, keepalive);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, keepalive);
  // gRPC's own pace (1 s, then up to 2 minutes) would fail all attempts of one policy.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  if (!options.authority.empty()) {
    arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, options.authority);
  }
  return grpc::CreateCustomChannel(address, options.credentials, arguments);
}

}  // namespace

Error::Error(const grpc::Status& status)
    : Error(status.error_code(), status.error_message(), status.error_details()) {}

Error::Error(const v1::SessionError& error)
    : Error(static_cast<grpc::StatusCode>(error.code()), error.message(), error.status()) {}

Error::Error(grpc::StatusCode code, const std::string& message, const std::string& details)
    : std::runtime_error(message), code_(code) {
  google::rpc::Status status;
  if (!status.ParseFromString(details)) return;  // a proxy's: its code still says what to do
  for (const auto& detail : status.details()) {
    google::rpc::RetryInfo retry;
    google::rpc::BadRequest bad;
    if (detail.UnpackTo(&retry)) {
      retry_after_ = Milliseconds(retry.retry_delay().seconds() * 1000 +
                                  retry.retry_delay().nanos() / 1000000);
    } else if (detail.UnpackTo(&bad) && bad.field_violations_size() > 0) {
      field_ = bad.field_violations(0).field();
    }
  }
}

bool Error::retryable() const {
  return code_ == grpc::StatusCode::UNAVAILABLE ||
         (code_ == grpc::StatusCode::RESOURCE_EXHAUSTED && retry_after_.has_value());
}

std::optional<Milliseconds> RetryPolicy::Wait(int failures, const Error& error) const {
  const Milliseconds asked = error.retry_after().value_or(Milliseconds(0));
  if (!error.retryable() || failures >= attempts || asked > longest_retry_after) {
    return std::nullopt;
  }
  const auto doubled = first_wait.count() << std::min(failures - 1, 20);
  const auto backoff = std::min<int64_t>(longest_wait.count(), doubled);
  thread_local std::mt19937 random{std::random_device{}()};
  // Half of it at least, so that clients that failed together come again apart.
  return asked + Milliseconds(std::uniform_int_distribution<int64_t>(backoff / 2, backoff)(random));
}

Session::Session(v1::InferenceService::Stub* stub) : stream_(stub->Session(&context_)) {}

Session::~Session() {
  context_.TryCancel();
  if (finished_) return;
  for (v1::SessionResponse unread; stream_->Read(&unread);) {
  }
  stream_->Finish();
}

uint64_t Session::Start(const v1::GenerateRequest& request) {
  v1::SessionRequest message;
  message.mutable_start()->set_id(++last_id_);
  *message.mutable_start()->mutable_generate() = request;
  Write(message);
  return message.start().id();
}

uint64_t Session::Start(const v1::ChatRequest& request) {
  v1::SessionRequest message;
  message.mutable_start()->set_id(++last_id_);
  *message.mutable_start()->mutable_chat() = request;
  Write(message);
  return message.start().id();
}

void Session::Cancel(uint64_t id) {
  v1::SessionRequest message;
  message.mutable_cancel()->set_id(id);
  Write(message);
}

void Session::Close() {
  std::lock_guard<std::mutex> lock(writing_);
  if (!std::exchange(closed_, true)) stream_->WritesDone();
}

bool Session::Next(v1::SessionEvent* event) {
  while (events_.empty()) {
    if (finished_) return false;
    v1::SessionResponse response;
    if (stream_->Read(&response)) {
      for (auto& each : *response.mutable_events()) events_.push_back(std::move(each));
      continue;
    }
    finished_ = true;
    const grpc::Status status = stream_->Finish();
    if (!status.ok()) throw Error(status);
  }
  *event = std::move(events_.front());
  events_.pop_front();
  return true;
}

void Session::Write(const v1::SessionRequest& request) {
  std::lock_guard<std::mutex> lock(writing_);
  if (closed_ || !stream_->Write(request)) {
    // Why it broke is for the reader: Finish may be called once.
    throw Error(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the session has ended"));
  }
}

Client::Client(const std::string& address, Options options)
    : options_(std::move(options)),
      channel_(MakeChannel(address, options_)),
      stub_(v1::InferenceService::NewStub(channel_)) {}

Stream<v1::GenerateResponse> Client::Generate(v1::GenerateRequest request,
                                              std::optional<Milliseconds> timeout) {
  auto opening = [stub = stub_.get(), request = std::move(request)](grpc::ClientContext* context) {
    return stub->Generate(context, request);
  };
  return {channel_, std::move(opening), DeadlineOf(timeout), options_.retry};
}

Stream<v1::ChatResponse> Client::Chat(v1::ChatRequest request,
                                      std::optional<Milliseconds> timeout) {
  auto opening = [stub = stub_.get(), request = std::move(request)](grpc::ClientContext* context) {
    return stub->Chat(context, request);
  };
  return {channel_, std::move(opening), DeadlineOf(timeout), options_.retry};
}

std::unique_ptr<Session> Client::OpenSession() { return std::make_unique<Session>(stub_.get()); }

std::vector<uint32_t> Client::Tokenize(const std::string& text) {
  v1::TokenizeRequest request;
  request.set_text(text);
  v1::TokenizeResponse response;
  grpc::ClientContext context;
  const grpc::Status status = stub_->Tokenize(&context, request, &response);
  if (!status.ok()) throw Error(status);
  return {response.token_ids().begin(), response.token_ids().end()};
}

}  // namespace triptych
